"""The loss mask beside the data reaches the micro-batches, token by token."""

import numpy as np
import pytest

from megatron.config import Config
from megatron.data.datasets import Reading, build_datasets, open_data
from megatron.data.sampler import MicroBatchStream, Share
from megatron.errors import DataError
from megatron.training.run.data import copy_to_node
from tests.data.implementations import ascending
from tests.helpers.indexed import write_documents

SEQ = 16
PAD = 7000
FIELDS = dict(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=SEQ,
    max_position_embeddings=SEQ,
    vocab_size=8000,
    micro_batch_size=2,
    global_batch_size=4,
    train_iters=1,
    split="1",
    loss_mask="required",
)


def write(prefix, first, sizes, *, masked=True):
    """Write documents of ids that count up from `first`; even ones are in the loss."""
    documents = ascending(sizes, first)
    if masked:
        masks = [[token % 2 == 0 for token in document] for document in documents]
        write_documents(f"{prefix}_mask", masks, np.uint8)
    return write_documents(prefix, documents)


def config(**fields):
    return Config.create(**{**FIELDS, **fields})


def batches(config, samples, **options):
    """Yield input, label, document-start flag and mask of each place of some samples."""
    reading = Reading(pad_id=PAD, **options)
    dataset = build_datasets(config, samples, 0, 0, reading=reading).train
    assert dataset is not None
    stream = MicroBatchStream(dataset, Share(2))
    for batch in stream.take(samples // 2):
        arrays = (batch.tokens, batch.labels, batch.position_ids == 0, batch.loss_mask)
        yield from zip(*(array.flatten().tolist() for array in arrays), strict=True)


@pytest.mark.parametrize("mmap", [True, False])
def test_cut_samples_have_the_marks_of_their_labels(tmp_path, mmap):
    sizes = [40, 3, 1, 25, 90]
    prefix = write(tmp_path / "a", 0, sizes)
    rows = list(batches(config(data_path=(prefix,), mmap_bin_files=mmap), 20))
    assert all(mask == (label % 2 == 0) for _, label, _, mask in rows)
    assert {label for _, label, *_ in rows} >= set(range(SEQ, 100))


def test_packed_samples_count_each_marked_prediction_once(tmp_path):
    """A document longer than a sample is cut like any other, with its marks."""
    sizes = [3, 5, 2, 1, 50, 9, 16, 17, 18]
    prefix = write(tmp_path / "a", 0, sizes)
    settings = config(data_path=(prefix,), data_packing="best-fit")
    (stream,) = build_datasets(settings, 1, 0, 0).train.sources
    one_epoch = stream.samples_per_epoch
    rows = list(batches(settings, one_epoch + one_epoch % 2))[: one_epoch * SEQ]
    ends = np.cumsum(sizes)
    firsts = {0, *ends.tolist()}
    counted = sorted(label for _, label, _, mask in rows if mask)
    assert counted == [i for i in range(ends[-1]) if i % 2 == 0 and i not in firsts]
    assert all(label == token + 1 for token, label, _, mask in rows if mask)


def test_a_blend_counts_all_tokens_of_data_without_a_mask_if_they_are_optional(
    tmp_path,
):
    masked = write(tmp_path / "a", 0, [200])
    plain = write(tmp_path / "b", 1000, [200], masked=False)
    blend = ("1", masked, "1", plain)
    rows = list(batches(config(data_path=blend, loss_mask="optional"), 8))
    assert all(mask == (label % 2 == 0 or label >= 1000) for _, label, _, mask in rows)
    assert len({label >= 1000 for _, label, *_ in rows}) == 2
    with pytest.raises(DataError, match="b_mask.idx"):
        list(batches(config(data_path=blend), 8))
    everything = list(batches(config(data_path=blend, loss_mask="ignore"), 8))
    assert all(mask for *_, mask in everything)


def test_a_copy_on_a_node_has_its_mask(tmp_path):
    prefix = write(tmp_path / "a", 0, [40])
    settings = config(data_path=(prefix,))
    copy = copy_to_node(prefix, tmp_path / "node")
    rows = list(batches(settings, 2, locations={prefix: copy}))
    assert copy != prefix and all(mask == (label % 2 == 0) for _, label, _, mask in rows)
    write(tmp_path / "a", 1, [40])
    assert copy_to_node(prefix, tmp_path / "node") != copy


def test_a_mask_has_to_be_asked_for_and_to_belong_to_the_data(tmp_path):
    prefix = write(tmp_path / "a", 0, [40, 10])
    settings = config(data_path=(prefix,))
    mask = tmp_path / "a_mask.bin"
    with pytest.raises(DataError, match="a_mask.bin.*--loss-mask"):
        open_data(prefix, config(data_path=(prefix,), loss_mask=None).data)
    content = bytearray(mask.read_bytes())
    content[7] = 2
    mask.write_bytes(content)
    with pytest.raises(DataError, match="a_mask.bin.*byte 7"):
        list(batches(settings, 4))
    write(tmp_path / "b", 0, [10, 40])
    for end in (".bin", ".idx"):
        (tmp_path / f"b_mask{end}").rename(tmp_path / f"a_mask{end}")
    with pytest.raises(DataError, match="a_mask.idx.*other data"):
        open_data(prefix, settings.data)
