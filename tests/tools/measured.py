"""Made-up runs whose figures are known: metrics files, points and logs as programs write them."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = {"22b": (48, 6144, 48), "175b": (96, 12288, 96), "1t": (128, 25600, 128)}
SEQUENCE, VOCABULARY = 2048, 51200


def paper_flops(model: str, batch: int, k: int = 4) -> float:
    """Dash et al.'s formula, written down a second time: FLOPs of an iteration."""
    layers, hidden, _ = SIZES[model]
    inner = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 24 * k * batch * SEQUENCE * layers * hidden**2 * inner


def settings(model: str, tensor: int, pipeline: int, data: int, batch: int, **more: Any) -> dict[str, Any]:
    layers, hidden, heads = SIZES[model]
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads,
        "ffn_hidden_size": 4 * hidden, "swiglu": False, "seq_length": SEQUENCE, "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline, "virtual_pipeline_model_parallel_size": 1,
        "data_parallel_size": data, "world_size": tensor * pipeline * data, "micro_batch_size": 1,
        "global_batch_size": batch, "recompute_granularity": "full", "rampup_batch_size": None, "fp16": True,
        "bf16": False, **more,
    }  # fmt: skip


def records(
    config: dict[str, Any], times: Sequence[float], *, batches: Sequence[int] | None = None,
    skipped: Sequence[int] = (), clock: float = 1e9, first: int = 0, device: str = "AMD Instinct MI250X",
) -> list[dict[str, Any]]:
    """Records of a run whose steps took `times` seconds; `skipped` are numbers of skipped iterations."""
    world, batch = config["world_size"], config["global_batch_size"]
    layers, hidden = config["num_layers"], config["hidden_size"]
    flops_per_sample = 96 * SEQUENCE * layers * hidden**2 * (
        1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    )
    layout = {
        "world": world, "tensor": config["tensor_model_parallel_size"],
        "pipeline": config["pipeline_model_parallel_size"], "data": config["data_parallel_size"],
    }  # fmt: skip
    found: list[dict[str, Any]] = [
        {"event": "start", "time": clock, "iteration": first, "config": config, "layout": layout, "device": device}
    ]
    consumed = 0
    for number, step_s in enumerate(times, first + 1):
        size = batches[number - first - 1] if batches else batch
        clock, consumed = clock + step_s, consumed + size
        rate = size / step_s
        found.append({
            "event": "iteration", "time": clock, "iteration": number, "consumed_samples": consumed,
            "global_batch_size": size, "seq_length": SEQUENCE, "lm_loss": 9.0, "loss_scale": 4096.0, "grad_norm": 1.5,
            "skipped": int(number in skipped), "nan": 0, "step_time_s": step_s, "samples_per_s": rate,
            "tokens_per_s": rate * SEQUENCE, "tokens_per_s_per_device": rate * SEQUENCE / world,
            "model_tflops": 0.75 * rate * flops_per_sample / world / 1e12,
            "hardware_tflops": rate * flops_per_sample / world / 1e12, "memory_bytes": (40 + number) * 2**30,
            "memory_rank": world - number,
        })  # fmt: skip
    found.append({"event": "end", "time": clock, "iteration": first + len(times), "reason": "done"})
    return found


def write(folder: Path, written: Sequence[dict[str, Any]], point: dict[str, Any] | None = None) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in written))
    if point is not None:
        (folder / "point.json").write_text(json.dumps(point))
    return folder


def mds_line(iteration: int, batch: int, step_s: float, tflops: float, **more: Any) -> str:
    """An iteration line in Megatron-DeepSpeed's form."""
    values = {"consumed": iteration * batch, "scale": 4096.0, "norm": 1.25, "skipped": 0, **more}
    return (
        f" iteration {iteration:8d}/{10:8d} | consumed samples: {values['consumed']:12d} | consumed tokens: "
        f"{values['consumed'] * SEQUENCE:12d} | elapsed time per iteration (ms): {1000 * step_s:.1f} | learning rate: "
        f"6.000E-05 | global batch size: {batch:5d} | lm loss: 9.109811E+00 | loss scale: {values['scale']:.1f} | "
        f"grad norm: {values['norm']:.3f} | num zeros: 0.0 | actual seqlen: {SEQUENCE:5d} | number of skipped "
        f"iterations: {values['skipped']:3d} | number of nan iterations:   0 | samples per second: "
        f"{batch / step_s:.3f} | TFLOPs: {tflops:.2f} |\n"
    )


def mlm_line(iteration: int, batch: int, step_s: float, tflops: float, stamp: str) -> str:
    """An iteration line in Megatron-LM's form."""
    return (
        f" [{stamp}] iteration {iteration:8d}/{10:8d} | consumed samples: {iteration * batch:12d} | elapsed time per "
        f"iteration (ms): {1000 * step_s:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | learning rate: "
        f"6.000000E-05 | global batch size: {batch:5d} | lm loss: 9.109811E+00 | loss scale: 1.0 | grad norm: 1.250 | "
        f"number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def arguments(values: dict[str, Any]) -> str:
    """The block of arguments at the head of a log."""
    rows = "".join(f"  {name} {'.' * max(3, 48 - len(name))} {value}\n" for name, value in values.items())
    return f"------------------------ arguments ------------------------\n{rows}--- end of arguments ---\n"


# A real line of the paper's authors' public log (facts about it: compatibility of formats, section 3.4).
ORNL_LINE = (
    " iteration        2/       5 | consumed samples:         2560 | consumed tokens:      5242880 | elapsed time per "
    "iteration (ms): 196496.4 | learning rate: 6.000E-05 | global batch size:  1280 | lm loss: 1.109811E+01 | loss "
    "scale: 1073741824.0 | grad norm: 0.000 | num zeros: 0.0 | actual seqlen:  2048 | number of skipped iterations:   "
    "0 | number of nan iterations:   0 | samples per second: 6.514 | TFLOPs: 149.46 |\n"
)
