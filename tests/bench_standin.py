"""Stands in for a process of `kvskim bench e2e`: it reports known figures. ``python bench_standin.py SPEC EVENTS``.

A decode job takes 10 ms a token on a dense engine and 4 ms with kvskim. What a batch of 13, 14, 15 or 16 does instead is in `odd`.
"""

import json
import sys
import time


def engine(side):
    layer = {"kv_heads": 8, "head_size": 128, "window": None, "element_bytes": 2, "latent": False, "record_bytes": 256 if side == "kvskim" else None}
    return {
        "vllm": "0.24.0", "start_s": 50.0, "weight_bytes": 16 * 10**9, "expert_bytes": 0, "layers": [layer] * 32, "kernels": side, "block": [],
        "graphs": "FULL", "kv_blocks": 1000 if side == "dense" else 970, "block_tokens": 16, "async_scheduling": True,
    }


def odd(batch, key, emit):
    if batch == 13:
        print("ValueError: the engine met its end\nEngineDeadError: see above", flush=True)
        sys.exit(1)
    if batch == 14:
        emit("result", job=key, value=None, error="too large for this GPU")
        return True
    if batch == 15:
        time.sleep(60)
    if batch == 16:
        print("(EngineCore pid=1) RuntimeError: out of blocks", flush=True)
        emit("result", job=key, value=None, error="EngineDeadError: EngineCore encountered an issue")
        emit("done")
        sys.exit(0)
    return False


def figures(job, side):
    if job["kind"] == "ttft":
        return {"ttft_ms": 100.0 if side == "dense" else 101.0, "runs_ms": []}
    if job["kind"] == "profile":
        kernel = {"group": "linear layers", "us": 9000.0 if side == "dense" else 3000.0, "launches": 4.0}
        idle = {"gaps_us": 500.0, "waits_us": 100.0}
        return {"steps": 16, "step_us": kernel["us"] + 600, "busy_us": kernel["us"], "groups": [kernel], "kernels": [{**kernel, "name": "nvjet"}], **idle}
    if job["kind"] == "load":
        return dict.fromkeys(("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "total_tokens_s", "most_decoding"), 1.0) | {
            "output_tokens_s": 100.0 if side == "dense" else 250.0
        }
    tpot = 10.0 if side == "dense" else 4.0
    heads = 32 * 8 * job["batch"]
    activity = {"attended": heads * 128, "total": heads * job["context"] // 16, "covered": heads * 0.5, "count": heads, "calibrated": True}
    return {"tpot_ms": tpot, "runs_ms": [tpot], "tokens_s": 1e3 * job["batch"] / tpot, "activity": activity if side == "kvskim" else {}}


def main():
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    with open(sys.argv[2], "a") as events:

        def emit(event, **fields):
            events.write(json.dumps({"event": event, **fields}) + "\n")
            events.flush()

        if spec["task"] == "prepare":
            emit("machine", gpu="a GPU", torch="2", cuda="13", copy_bandwidth=4e12)
        else:
            side = spec["side"]
            if side == "dense" and spec["llm"].get("num_gpu_blocks_override") == 666:
                print("RuntimeError: no memory for the cache", flush=True)
                sys.exit(3)
            emit("phase", text="starting the engine")
            emit("engine", **engine(side))
            for job in spec["jobs"]:
                key = json.dumps(job, sort_keys=True)
                emit("job", job=key)
                if not odd(job["batch"], key, emit):
                    emit("result", job=key, value=figures(job, side), error="")
        emit("done")


main()
