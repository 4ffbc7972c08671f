"""Made-up runs with known figures: metrics files and points as programs write them."""

import json

SIZES = {"22b": (48, 6144, 48), "175b": (96, 12288, 96), "1t": (128, 25600, 128)}
SEQUENCE = 2048
VOCABULARY = 51200


def paper_flops(model, batch, k=4):
    """Return the FLOPs of an iteration by Dash et al.'s formula, written here again."""
    layers, hidden, _ = SIZES[model]
    return flops_of(layers, hidden, batch, k)


def flops_of(layers, hidden, batch, k=4):
    inner = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 24 * k * batch * SEQUENCE * layers * hidden**2 * inner


def settings(model, tensor, pipeline, data, batch, **more):
    layers, hidden, heads = SIZES[model]
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "ffn_hidden_size": 4 * hidden,
        "swiglu": False,
        "seq_length": SEQUENCE,
        "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": 1,
        "data_parallel_size": data,
        "world_size": tensor * pipeline * data,
        "micro_batch_size": 1,
        "global_batch_size": batch,
        "recompute_granularity": "full",
        "rampup_batch_size": None,
        "fp16": True,
        "bf16": False,
        **more,
    }


def records(
    config,
    times,
    *,
    batches=None,
    skipped=(),
    clock=1e9,
    first=0,
    device="AMD Instinct MI250X",
):
    """Return the records of a run whose steps took `times` seconds.

    `skipped` are numbers of skipped iterations.
    """
    world = config["world_size"]
    batch = config["global_batch_size"]
    layers = config["num_layers"]
    hidden = config["hidden_size"]
    flops_per_sample = flops_of(layers, hidden, 1)
    layout = {
        "world": world,
        "tensor": config["tensor_model_parallel_size"],
        "pipeline": config["pipeline_model_parallel_size"],
        "data": config["data_parallel_size"],
    }
    events = [
        {
            "event": "start",
            "time": clock,
            "iteration": first,
            "config": config,
            "layout": layout,
            "device": device,
        }
    ]
    consumed = 0
    for number, step_s in enumerate(times, first + 1):
        size = batches[number - first - 1] if batches else batch
        clock = clock + step_s
        consumed = consumed + size
        rate = size / step_s
        events.append(
            {
                "event": "iteration",
                "time": clock,
                "iteration": number,
                "consumed_samples": consumed,
                "global_batch_size": size,
                "seq_length": SEQUENCE,
                "lm_loss": 9.0,
                "loss_scale": 4096.0,
                "grad_norm": 1.5,
                "skipped": int(number in skipped),
                "nan": 0,
                "step_time_s": step_s,
                "samples_per_s": rate,
                "tokens_per_s": rate * SEQUENCE,
                "tokens_per_s_per_device": rate * SEQUENCE / world,
                "model_tflops": 0.75 * rate * flops_per_sample / world / 1e12,
                "hardware_tflops": rate * flops_per_sample / world / 1e12,
                "memory_bytes": (40 + number) * 2**30,
                "memory_rank": max(0, world - number),
            }
        )
    events.append(
        {"event": "end", "time": clock, "iteration": first + len(times), "reason": "done"}
    )
    return events


def write(folder, written, point=None):
    """Write a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in written))
    if point is not None:
        (folder / "point.json").write_text(json.dumps(point))
    return folder
