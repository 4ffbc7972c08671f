"""Intact files of every format that this project reads, and ways to damage them."""

import argparse
import base64
import io
import json
import os
import pickle
import re
import resource
import shutil
import stat
import struct
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from tests.helpers.launching import ROOT, Script

TEXTS = ["17 5 99 3", "1 2 3 4 5 6 7 8 9", "42"] * 40
MEMORY_BYTES = 4 << 30
VOCABULARY = (
    "--tokenizer-type GPT2BPETokenizer --vocab-file {f}/vocab.json --merge-file {f}/merges.txt"
)
GPT2 = f"--input {{f}}/e.txt --workers 1 {VOCABULARY}"
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0 "
    "--num-workers 0"
)


CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
)


def nothing(folder):
    pass


def tool(folder, script, words, log="made.log"):
    arguments = [word.replace("{f}", str(folder)) for word in words.split()]
    limit = (resource.setrlimit, resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with Script(script, arguments, folder / log, arm=limit) as running:
        outcome = running.wait(300)
    assert outcome.code == 0, outcome
    (folder / log).unlink()


def legacy(folder):
    """Forge a checkpoint of an old format, without a manifest, and with pickles as its files."""
    from tests.checkpoint.written import make, tensors

    made = make(folder / "run", 5, tensors())
    for name in (".metadata", "__0_0.distcp", "common.pt", "state.pkl"):
        (made / name).write_bytes(payload(folder))
    state = json.loads((made / "state.json").read_text())
    (made / "state.json").write_text(json.dumps({**state, "format": 1}))
    (made / "manifest.json").unlink()


def measured(folder):
    from tests.tools.measured import records, settings, write

    cluster(folder)
    write(
        folder / "run",
        records(settings("22b", 1, 1, 8, 640), [9.0, 5.0, 5.1, 4.9]),
        {"name": "a", "warm_up": 1},
    )
    (folder / "run" / "result.json").write_text(
        '{"status": "done", "reason": null, "exit_code": 0}'
    )
    (folder / "run" / "timeline.json").write_text(
        '{"traceEvents": [{"name": "forward", "ph": "X", "ts": 0, "dur": 900.5, "pid": 0, "tid": 0,'
        ' "args": {"stage": 0, "micro_batch": 0, "op": "forward"}}]}'
    )


def data(folder):
    import numpy as np

    from megatron.data.indexed_writer import IndexedDatasetWriter

    for name in "ab":
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for length in range(1, 40):
                writer.add_document([i % 128 for i in range(length)])
    words = f"{SMALL} --train-iters 2 --data-path {{f}}/a --data-cache-path {{f}}/cache"
    tool(folder, "tools/build_index.py", f"{words} --vocab-size 128 --world-size 1")


def settings(folder):
    (folder / "run.toml").write_text(
        "seed = 7\n[optimizer]\nweight-decay = 0.1\nadam_beta2 = 0.95\n"
        '[data]\nsplit = "90,5,5"\n[logging]\nprofile_ranks = [0, 1]\nlog-interval = 1\n'
        '[start]\nexit-interval = 2\nno_load_optim = true\nkill-switch-file = "stop"\n'
    )


def deepspeed_json(folder):
    (folder / "ds.json").write_text(
        """{"train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}}"""
    )


def cluster(folder):
    shutil.copy(ROOT / "megatron/planner/clusters/frontier.toml", folder / "machine.toml")


def timeline(folder):
    (folder / "timeline.json").write_text(
        """{"traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0,
         "args": {"name": "rank 0", "pipeline": 0, "tensor": 0, "iteration": 10}},
        {"ph": "X", "cat": "forward", "ts": 0, "dur": 5.0, "pid": 0, "tid": 0,
         "args": {"op": 0, "stage": 0, "micro_batch": 0}},
        {"ph": "X", "cat": "backward", "ts": 20.0, "dur": 5.0, "pid": 0, "tid": 0,
         "args": {"op": 1, "stage": 0, "micro_batch": 0}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1,
         "args": {"name": "rank 1", "pipeline": 1, "tensor": 0, "iteration": 10}},
        {"ph": "X", "cat": "forward", "ts": 5.0, "dur": 5.0, "pid": 0, "tid": 1,
         "args": {"op": 0, "stage": 1, "micro_batch": 0}},
        {"ph": "X", "cat": "backward", "ts": 15.0, "dur": 5.0, "pid": 0, "tid": 1,
         "args": {"op": 1, "stage": 1, "micro_batch": 0}}]}"""
    )


def space(folder):
    cluster(folder)
    shutil.copy(ROOT / "megatron/jobs/spaces/two-cores.toml", folder / "space.toml")


def searched(folder):
    from tests.jobs.test_tune import SPACE

    (folder / "space.toml").write_text(SPACE.replace("8192", "64"))
    words = "--space {f}/space.toml --no-prior --search optuna --processes 2 --confirm 0"
    tool(folder, "tools/tune.py", f"{words} --max-trials 1 --out {{f}}/tune")


def sources(folder):
    (folder / "lib").mkdir()
    for name in ("ast", "bisect", "cmd"):
        shutil.copy(Path(io.__file__).with_name(f"{name}.py"), folder / "lib")


def job(folder):
    cluster(folder)
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    (folder / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH -A abc123\n#SBATCH -N 2\n#SBATCH -t 02:00:00\n#SBATCH "
        "--ntasks-per-node=8\nsrun true\n"
    )


def texts(folder):
    from tests.helpers.preprocessing import write_input

    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        write_input(folder / name, TEXTS)
    shutil.copy(io.__file__, folder / "e.txt")


def gpt2(folder):
    from megatron.data.tokenizer_adapters import byte_letters

    texts(folder)
    letters = byte_letters()
    words = [*letters, "he", "hel"]
    (folder / "vocab.json").write_text(
        json.dumps({w: i for i, w in enumerate([*words, "<|endoftext|>"])})
    )
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")


def recorded(folder):
    """Make two data sets with records of their tokenizer."""
    gpt2(folder)
    for name in "ab":
        tool(folder, "tools/preprocess_data.py", f"{GPT2} --output-prefix {{f}}/{name}")


def hugging_face(folder):
    from tests.helpers.preprocessing import byte_tokenizer

    texts(folder)
    (folder / "hf").mkdir()
    byte_tokenizer(folder / "hf")
    (folder / "hf" / "bytes.json").rename(folder / "hf" / "tokenizer.json")
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "hf" / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|endoftext|>"}}'
    )
    (folder / "hf" / "added_tokens.json").write_text('{"<|user|>": 257, "<|assistant|>": 258}')


def ranks(folder):
    texts(folder)
    tokens = [*(bytes([b]) for b in range(256)), *(b"%02d" % i for i in range(40))]
    coded = [base64.b64encode(token).decode() for token in tokens]
    (folder / "x.tiktoken").write_text("".join(f"{token} {i}\n" for i, token in enumerate(coded)))
    (folder / "x.json").write_text(
        json.dumps([{"rank": i, "token_bytes": t} for i, t in enumerate(coded)])
    )


def megatron(folder):
    from tests.tools.conversion.test_megatron import write

    write(folder / "megatron", "gpt", 2, 1, 1, 3.0, True)


def torch_dist(folder):
    from tests.tools.conversion.test_torch_dist import write

    write(folder / "megatron", "gpt")


def by_tool(script, words, before=nothing):
    """Return a maker that runs a program after the maker `before`."""

    def make(folder):
        before(folder)
        tool(folder, script, words)

    return make


def of_hugging_face(case):
    """Return a maker of a model of transformers, in several files with an index, and a tokenizer."""

    def make(folder):
        from tests.helpers import hugging_face as models

        models.make(case, folder / "hf", max_shard_size="40KB")
        models.save_tokenizer(folder / "hf", entries=40)
        (folder / "hf" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')

    return make


def conversations(folder):
    hugging_face(folder)
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    lines = [{"messages": turns * 3}, {"messages": turns, "tools": [{"name": "f"}]}]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) * 10)
    (folder / "hf" / "chat_template.jinja").write_text(CHAT)
    (folder / "hf" / "additional_chat_templates").mkdir()
    (folder / "hf" / "additional_chat_templates" / "tool_use.jinja").write_text(CHAT)


def named_templates(folder):
    """Make the files of `conversations`, but with the templates in tokenizer_config.json."""
    conversations(folder)
    (folder / "hf" / "chat_template.jinja").unlink()
    shutil.rmtree(folder / "hf" / "additional_chat_templates")
    named = [{"name": name, "template": CHAT} for name in ("default", "tool_use")]
    config = {"eos_token": "<|endoftext|>", "chat_template": named}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(config))


def nodes(folder):
    """Make two folders with the same files: a model, data, tasks and a list."""
    first = folder / "0"
    first.mkdir()
    of_hugging_face("llama")(first)
    data(first)
    (first / "tasks.jsonl").write_text('{"context": "A", "choices": ["B", "C"], "answer": 0}\n' * 3)
    (first / "list").write_text("1.0 a\n2.0 b\n")
    shutil.copytree(first, folder / "1")


def deepspeed(folder):
    from tests.helpers.processes import run_processes
    from tests.tools.conversion.runs import of_our_own_names

    run_processes(1, of_our_own_names, str(folder / "deepspeed"), timeout_s=300)


# -- damage ----------------------------------------------------------------------------------------

_INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 255)
_VALUES = (
    *json.loads(
        """[null, true, 0, -1, 1, 2, 0.5, 1000000, 2147483648, 9223372036854775808,
        18446744073709551616, -9223372036854775808, 1e308, -1e308, NaN, Infinity, "", "x",
        "é\\ud800", "\\u0000", "../../x", "/nowhere", "torch.float32", "nan", "1e9", [], {}, [[]],
        [null], {"": null}, {"x": {"x": {}}}, [1, "x"], [{}, 1], [1, {}], [[1], {"x": 1}]]"""
    ),
    *("a" * 10000, ["x"] * 20000),
)
_LITERALS = (
    *'0 -1 1e308 nan inf true null "" "x" [] {} [[]] \\ 1979-05-27T07:32:00Z \'x\' a.b.c'.split(),
    *"__import__('os').mkdir('RAN') 9**9**9 \xff".split(),
    *("9" * 20, "9" * 5000, "[" * 5000, '{"a":' * 5000, "[" * 2000 + "]" * 2000, "\x00"),
    *('"' + "a" * 10000 + '"', "$(mkdir RAN)", "(lambda: 0)()", "x" * 5000),
)
_MAGIC = (b"\x1f\x8b", b"PK")  # gzip, zip


class _Calls:
    """Object that is unpickled by a call of os.mkdir, which leaves a folder behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


# Templates that do not end, that make a huge text, or that no compiler accepts.
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:>999999999999}'.format(1) }}",
    "{{ " + "9" * 5000 + " }}",
    "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
    "{% for i in [1] %}" * 21 + "{{ i }}" + "{% endfor %}" * 21,
    "{% for i in [1] %}" * 300 + "{% endfor %}" * 300,
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('RAN') }}",
    "{% include '/etc/passwd' %}",
    "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ messages[99].content }}",
    "{{ range(10 ** 18) | list }}",
    "{{ ('a' * 30 + '!') | regex_replace('(a+)+$', '') }}",
    "{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}",
    "{% generation %}",
    "{{ lipsum(n=10 ** 9) }}",
    "{{ '\ud800' }}",
    "",
)
# Normalizers of a tokenizer.json whose results take too much memory or time.
NORMALIZERS = (
    {
        "type": "Sequence",
        "normalizers": 40 * [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}],
    },
    {"type": "Replace", "pattern": {"Regex": "(e+)+$"}, "content": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "e" * 10000},
    {"type": "Prepend", "prepend": "e" * 10**6},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
)


# For CONTENTS: functions change a file's content, so that large contents are made only when used.
def _changed(**values):
    """Return a function that sets members of a JSON object."""
    return lambda content: json.dumps(json.loads(content) | values).encode()


def _begun(lines):
    """Return a function that prepends lines to a settings file and drops its last table."""
    return lambda content: lines + b"\n" + content.partition(b"[start]")[0]


def _field(tag, content):
    """Return a field of a protobuf: its tag, the length of its content, and the content."""
    length = bytes(len(content) >> 7 * i & 127 | 128 * (i < 4) for i in range(5))
    return bytes([tag << 3 | 2]) + length + content


def _rank_lines(tokens):
    return b"".join(base64.b64encode(t) + b" %d\n" % (296 + i) for i, t in enumerate(tokens))


_DOUBLED = ["e" * 2**i for i in range(23)]
# Contents that random damage would not produce: numbers, lengths, lines and levels far beyond any
# use. Bytes are added at the end of a file.
CONTENTS = {
    "vocab.json": (
        *(_changed(he=i) for i in (2**22, 2**31 - 1, 2**63, -1, 1.5)),
        _changed(**{token: 1000 + i for i, token in enumerate(_DOUBLED[1:])}),
        _changed(**{f"{i}": 1000 + i for i in range(10**6)}),
        lambda content: b'{"' + 10**8 * b"a" + b'": 0, ' + content[1:],
    ),
    "merges.txt": (
        lambda content: content + 10**8 * b"e",
        lambda content: content + 10**6 * b"h e\n",
        b"h\0 e\n",
        b"\xed\xa0\x80 e\n",
    ),
    "*.tiktoken": (
        lambda content: content + 10**8 * b"A" + b" 296\n",
        lambda content: content + _rank_lines([t.encode() for t in _DOUBLED[1:]]),
        lambda content: content + _rank_lines([b"%d" % i for i in range(1000, 10**6)]),
        b"ZWVl %d\n" % 2**63,
        b"\xff 296",
    ),
    "*.model": (
        b"\x0a" + 9 * b"\xff" + b"\x01",
        lambda content: content + 10**6 * _field(1, b""),
        lambda content: content + _field(1, _field(1, 10**7 * b"e")),
        _field(1, _field(1, b"ee") + b"\x15\x00\x00\xc0\x7f"),
        _field(3, _field(2, b"\xff\xff\xff\x7f" + 1000 * b"\xff")),
    ),
    "*.tokenizer.json": (
        *(_changed(vocab_size=n, eod=n, largest_id=n) for n in (2**62, 2**63 - 1, 2**63, -1, True)),
        _changed(tokenizer="\x1b[2J\0\ud800"),
        _changed(digest="a" * 10**6),
        lambda content: 10**6 * b"[",
        lambda content: content.decode().encode("utf-16"),
    ),
    "run.toml": (
        *map(
            _begun,
            (
                b"start = 1",
                b"start.start.seed = 1",
                b"start.exit-interval = %d" % 2**70,
                b"start.exit_interval = 1\nexit-interval = 1",
                b'"exit-interval" = [1, [2, [3]]]',
                b'"' + 10**6 * b"a" + b'" = 1',
            ),
        ),
        lambda content: content.replace(b"[start]", b"[[start]]"),
        lambda content: content + content[content.index(b"[start]") :].replace(b"-", b"_"),
    ),
}


def _pattern(path):
    return next((pattern for pattern in CONTENTS if fnmatch(path.name, pattern)), "")


# After a pickle's first two bytes: nested pairs of one value as keys, shared lists, copies.
_PAIRS = b")" + 60 * b"\x85q\x00h\x00h\x00\x86"
PICKLES = (
    b"}" + _PAIRS + b"Ns",
    b"}(" + _PAIRS + b"Nu",
    b"ccollections\nOrderedDict\n](](" + _PAIRS + b"Nee\x85R",
    b"]" + 60 * b"q\x00](h\x00h\x00e",
    5000 * b"]" + 4999 * b"a",
    b"]q\x00h\x00a",
    b"](" + 30000 * b"K\x01" + b"eq\x01]q\x02(" + 3000 * b"ctorch\nSize\nh\x01\x85R" + b"e",
    b"}X\x04\x00\x00\x00argsX\x01\x00\x00\x00xs",
)


def payload(folder, chance=None):
    if chance is not None and chance.random() < 0.5:
        return b"\x80\x02" + chance.choice(PICKLES) + b"."
    return pickle.dumps({"args": _Calls(str(folder / "RAN"))}, protocol=2)


def damage(folder, chance):
    """Damage one file of the case, occasionally two; return how."""
    done = {}
    for _ in range(1 if chance.random() < 0.8 else 2):
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and not (path.is_symlink() or path in done)
            and (path.parent != folder or path.name not in _SPECIAL)
        ]
        if not files:
            break
        path = chance.choice(files)
        draw = chance.random()
        if draw < 0.2:
            what = chance.choice((*_SPECIAL, "gone", "large"))
            special(path, what)
        elif draw < 0.3:
            what = "another pickle"
            _plant(path, folder, chance)
        elif path.suffix == ".jinja" and draw < 0.8:
            what = "another template"
            path.write_text(chance.choice(TEMPLATES), errors="surrogatepass")
        elif path.name == "tokenizer.json" and draw < 0.45:
            what = "another normalizer"
            content = json.loads(path.read_text()) | {"normalizer": chance.choice(NORMALIZERS)}
            path.write_text(json.dumps(content))
        elif path.suffix == ".toml" and draw < 0.5:
            what = "code that is named"
            (folder / "evil.py").write_text("import os\nos.mkdir('RAN')\nPIECES = {}\n")
            named = ("evil.py", "../evil.py", ["evil:X"], "evil:X")
            key = chance.choice(("pieces", "callback", "--pieces", "cluster", "deepspeed_config"))
            line = f"{json.dumps(key)} = {json.dumps(chance.choice(named))}\n"
            path.write_bytes(
                chance.choice((b"", b"[logging]\n")) + line.encode() + path.read_bytes()
            )
        elif path.suffix == ".pt" and zipfile.is_zipfile(path) and draw < 0.8:
            what = "in_torch"
            in_torch(path, chance)
        elif draw < 0.65 and (pattern := _pattern(path)):
            what = "another content"
            change = chance.choice(CONTENTS[pattern])
            content = path.read_bytes()
            path.write_bytes(content + change if isinstance(change, bytes) else change(content))
        else:
            content = path.read_bytes()
            mutations = [in_text, in_bytes] if _is_text(content) else [in_bytes]
            if _is_json(content):
                mutations += [in_json, in_json]
            mutation = chance.choice(mutations)
            what = mutation.__name__
            path.write_bytes(mutation(content, chance))
        done[path] = what
    return "; ".join(f"{path.relative_to(folder)}: {what}" for path, what in done.items())


_SPECIAL = ("fifo", "loop", "zero", "folder", "empty")


def special(path, what):
    """Replace a file by what a word of _SPECIAL names, or by a "large" one; "gone": remove it."""
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "zero":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.stat("/dev/zero").st_rdev)
        except PermissionError:
            path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    elif what == "empty":
        path.touch()
    elif what == "large":
        path.touch()
        # Sparse: too large for memory, but quickly read piece by piece.
        os.truncate(path, MEMORY_BYTES + 1)


def _plant(path, folder, chance):
    """Plant a pickle in place of a file, or of the pickle within a file by torch.save."""
    try:
        with zipfile.ZipFile(path) as old:
            members = {name: old.read(name) for name in old.namelist()}
    except zipfile.BadZipFile:  # not a zip file, or one with wrong checksums
        path.write_bytes(payload(folder, chance))
        return
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            hostile = name.endswith("data.pkl")
            new.writestr(name, payload(folder, chance) if hostile else content)


def _is_text(content):
    return b"\0" not in content[:4096] and not content.startswith(_MAGIC)


def _is_json(content):
    return content.lstrip()[:1] in (b"{", b"[")


def in_bytes(content, chance):
    if not content:
        return chance.randbytes(100)
    at = chance.randrange(len(content))
    length = chance.randint(1, 40)
    variant = chance.randrange(6)
    # Half of all places are in the first hundred bytes, where headers are.
    at = at if chance.random() < 0.5 else at % 100
    before = content[:at]
    after = content[at:]
    if variant == 0:
        return before
    if variant == 1:
        return before + bytes([after[0] ^ 1 << chance.randrange(8)]) + after[1:]
    if variant == 2:
        return before + chance.randbytes(length) + after
    if variant == 3:
        return before + bytes(min(length, len(after))) + after[length:]
    number = chance.choice(_INTEGERS)
    form = chance.choice("iqq")
    at -= at % 4 if chance.random() < 0.5 else 0
    size = struct.calcsize(form)
    new = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return content[:at] + new + content[at + size :]


def in_text(content, chance):
    """Replace, double or drop a word, a number, a string or a line."""
    text = content.decode("utf-8", "surrogateescape")
    variant = chance.randrange(6)
    if variant < 4:
        tokens = list(re.finditer(r'"[^"\n]*"|[\w.+-]+|[\[\]{}=:,]', text))
        if tokens:
            token = chance.choice(tokens)
            new = "" if variant == 3 else chance.choice(_LITERALS)
            text = text[: token.start()] + new + text[token.end() :]
    else:
        lines = text.splitlines(keepends=True) or [""]
        at = chance.randrange(len(lines))
        lines[at : at + 1] = [] if variant == 4 else [lines[at], chance.choice(lines)]
        text = "".join(lines)
    return text.encode("utf-8", "surrogateescape")


def in_json(content, chance):
    """Replace, rename or drop a value somewhere in the document, or in one of its lines."""
    lines = [content]
    try:
        json.loads(content)
    except ValueError:
        lines = content.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    try:
        document = [json.loads(lines[at])]
    except ValueError:
        return in_text(content, chance)
    _change(document, chance)
    lines[at] = json.dumps(document[0]).encode() + (b"\n" if lines[at].endswith(b"\n") else b"")
    return b"".join(lines)


def in_torch(path, chance):
    """Replace, rename or drop a value in a file by torch.save."""
    import torch

    document = [torch.load(path, weights_only=False)]
    _change(document, chance)
    torch.save(document[0], path)


def _change(document, chance):
    holder, key = chance.choice(_nodes(document))
    draw = chance.random()
    if draw < 0.15 and holder is not document:
        del holder[key]
    elif draw < 0.25 and isinstance(holder, dict):
        holder[chance.choice(("", "x", "format"))] = holder.pop(key)
    else:
        holder[key] = chance.choice(_VALUES)


def _nodes(value):
    """Return (container, key) of all values within a value, in a fixed order."""
    nodes = []
    open_ = [value]
    while open_:
        holder = open_.pop()
        holder = vars(holder) if isinstance(holder, argparse.Namespace) else holder
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            nodes.append((holder, key))
            if isinstance(holder[key], dict | list | argparse.Namespace):
                open_.append(holder[key])
    return nodes


_MADE = (
    "nothing legacy measured data deepspeed_json settings cluster timeline space searched sources "
    "job texts gpt2 hugging_face ranks megatron torch_dist deepspeed conversations "
    "named_templates recorded nodes"
)
_TRAIN = f"{SMALL} --save {{f}}/run --train-iters"
MAKERS = {
    **{name: globals()[name] for name in _MADE.split()},
    "run": by_tool("pretrain_gpt.py", f"{_TRAIN} 2 --save-interval 1 --vocab-size 128 --mock-data"),
    "spoken": by_tool(
        "pretrain_gpt.py",
        f"{_TRAIN} 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 127",
    ),
    "trained": by_tool("pretrain_gpt.py", f"{_TRAIN} 2 --vocab-size 128 --data-path {{f}}/a", data),
    "points": by_tool(
        "tools/run_experiment.py",
        "tp --model tiny --values 1,2 --launcher local --cluster {f}/machine.toml --iterations 1 "
        "--warm-up 1 --limit 200 --out {f}/points",
        cluster,
    ),
    "pieces": by_tool(
        "tools/train_tokenizer.py",
        "--input {f}/e.txt --output {f}/spm.model --vocab-size 400",
        texts,
    ),
}
FAMILIES = (
    "gpt2 llama3 llama-biased llama31 llama-yarn mistral-window qwen2-window qwen3 olmo2 mixtral "
    "olmoe qwen3_moe qwen2_moe gemma2 pythia bloom"
).split()
MAKERS |= {f"hf {case}": of_hugging_face(case) for case in FAMILIES}
