"""Train SmolLM2-135M-Instruct to answer questions about 16K and 32K tokens: a larger rotary base, and a low-rank adapter on every linear layer.

    python benchmarks/long-smollm/train.py --model MODEL_FOLDER --output OUTPUT_FOLDER

For one GPU with 80 GB or more. The training ends by itself after --seconds and leaves in the output folder adapter.safetensors, the adapter of half the
time (half.safetensors) and log.json. Then merge.py makes a model folder of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from documents import ANSWER, END, FIRST_ANSWER, LANGUAGE, NEEDLE_TASKS
from feed import Batch, Feed
from forward import ATTENTION_NAME, Attention, choose_attention, fuse_norms, predictions, register_attention
from low_rank import attach, load_base, load_into, read_adapter, save_adapter

from kvskim.errors import KvskimError

WEIGHTS = {LANGUAGE: 0.03, ANSWER: 1.0, FIRST_ANSWER: 3.0, END: 0.3}
"""Of the roles of tokens in the loss. An evaluation has one question, so the first of a document counts more."""
WARMUP, DECAY = 0.02, 0.6
"""Parts of the time: the learning rate rises until the first, and falls from the second on, to `LAST_RATE` of its height."""
LAST_RATE = 0.05
MEASURED_LENGTHS = (4096, 8192, 16384)
MEASURED_AT = (0.0, 0.12, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Parts of the time at which the held-out samples are answered."""
LOG_SECONDS = 10.0


def rate_at(fraction: float) -> float:
    """Learning rate at a part of the time, as a share of its height."""
    if fraction < WARMUP:
        return max(fraction / WARMUP, 0.05)
    return 1.0 if fraction < DECAY else max(LAST_RATE, 1 - (1 - LAST_RATE) * (fraction - DECAY) / (1 - DECAY))


class Clock:
    """Part of the training that is over: by time, or by steps where their number is given. A resumed training begins at the part it had reached."""

    def __init__(self, seconds: float, steps: int, begin: float) -> None:
        self.seconds, self.steps, self.begin, self.step = seconds, steps, begin, 0
        self.started = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def fraction(self) -> float:
        by_time = self.begin + self.elapsed() / self.seconds
        return max(by_time, self.begin + (1 - self.begin) * self.step / self.steps) if self.steps else by_time


class Trainer:
    """Everything that a step needs.

    Args:
        options: of the command line.
        device: of the model.
        log: takes one line.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        register_attention()
        self.model = load_base(options.model, options.theta, options.longest, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME).to(device).train()
        self.layers = attach(self.model, options.rank, options.mlp_rank, options.seed)
        begin = 0.0
        if options.resume:
            tensors, metadata = read_adapter(options.resume)
            if float(metadata["rope_theta"]) != options.theta:
                raise KvskimError(f"--theta is {options.theta}, but {options.resume} was trained with {metadata['rope_theta']}: give that")
            load_into(self.layers, tensors)
            begin = float(metadata["fraction"])
        self.begin = begin if options.start is None else options.start
        if not 0 <= self.begin < 1:
            raise KvskimError(f"the training would start at {self.begin} of its time, where nothing is left: give --start, 0.5 for instance")
        fuse_norms(self.model)
        groups = [
            dict(params=[layer.down for layer in self.layers.values()], height=options.lr),
            dict(params=[layer.up for layer in self.layers.values()], height=options.lr * options.up_rate),
        ]
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.weights = torch.zeros(8, device=device)
        for role, weight in WEIGHTS.items():
            self.weights[role] = weight
        self.micro_tokens, self.skipped = options.micro_tokens, 0

    def tensors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(batch.ids).to(self.device).long(), torch.from_numpy(batch.roles).to(self.device).long()

    def gradients(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of a batch; mean loss of answers and of text."""
        ids, roles = self.tensors(batch)
        texts = (roles[:, 1:] == LANGUAGE).sum().clamp_min(1)
        answers = self.weights[roles[:, 1:]][roles[:, 1:] != LANGUAGE].sum()
        rows = max(1, self.micro_tokens // batch.length)
        sums = dict(answers=0.0, text=0.0)
        for start in range(0, len(ids), rows):
            part = slice(start, start + rows)
            logits, wanted, role = predictions(self.model, ids[part], roles[part])
            loss = F.cross_entropy(logits, wanted, reduction="none")
            # Answers and text are each a mean over the batch, however many tokens of either it has.
            text = role == LANGUAGE
            weight = torch.where(text, WEIGHTS[LANGUAGE] / texts, self.weights[role] / answers)
            (loss * weight).sum().backward()
            weighted = (loss * weight).detach()
            sums["answers"] += float(weighted[~text].sum())
            sums["text"] += float(weighted[text].sum()) / WEIGHTS[LANGUAGE]
        return sums

    def step(self, batch: Batch, rate: float, log: Any) -> dict[str, float]:
        """One step of the optimiser. Out of memory: smaller parts from now on. A kernel of cuDNN that fails: flash attention from now on."""
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            try:
                sums = self.gradients(batch)
                break
            except torch.OutOfMemoryError:
                rows = max(1, self.micro_tokens // batch.length)
                if min(rows, len(batch.ids)) == 1:
                    raise
                self.micro_tokens = min(rows, len(batch.ids)) // 2 * batch.length
                log(f"out of memory: parts of {self.micro_tokens} tokens from now on")
            except RuntimeError as error:
                if len(Attention.backends) < 3:
                    raise
                log(f"attention fails ({str(error).splitlines()[0]}): the flash kernel from now on")
                Attention.backends = Attention.backends[1:]
            torch.cuda.empty_cache()
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0))
        if not math.isfinite(norm):
            # One such step would destroy the adapter; they are counted in the log.
            self.skipped += 1
            return {**sums, "norm": norm}
        for group in self.optimizer.param_groups:
            group["lr"] = group["height"] * rate
        self.optimizer.step()
        return {**sums, "norm": norm}

    @torch.no_grad()
    def exact(self, ids: Any, roles: Any, length: int) -> float:
        """Share of held-out samples with every token of the answer predicted right from the right tokens before it."""
        rows, right = max(1, self.micro_tokens // length), 0
        for start in range(0, len(ids), rows):
            part, role = self.tensors(Batch(0, length, ids[start : start + rows], roles[start : start + rows]))
            logits, wanted, _ = predictions(self.model, part, torch.where(role == FIRST_ANSWER, role, 0))
            owner = torch.nonzero(role[:, 1:] == FIRST_ANSWER)[:, 0]
            wrong = torch.zeros(len(part), device=self.device).index_add(0, owner, (logits.argmax(-1) != wanted).float())
            right += int((wrong == 0).sum())
        return right / len(ids)

    def save(self, name: str, fraction: float) -> None:
        metadata = dict(rope_theta=str(self.options.theta), max_position_embeddings=str(self.options.longest), fraction=f"{min(fraction, 1):.4f}")
        save_adapter(self.options.output / name, self.layers, {**metadata, "base": "SmolLM2-135M-Instruct"})


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The whole training; the log that is also written to log.json."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.output.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(f"{time.monotonic() - began:6.1f} s  {line}")
        print(lines[-1], flush=True)

    # The workers make what the first steps need while the model is loaded.
    clock = Clock(options.seconds, options.steps, 0.0)
    # A resumed training must not see the same documents again.
    seed = options.seed + (1 if options.resume else 0)
    feed = Feed(options.model, options.workers, seed, options.longest, lambda: clock.fraction(), options.step_scale)
    try:
        lengths = [length for length in MEASURED_LENGTHS if length <= options.longest] or [options.longest]
        samples = {(task, length): feed.held_out(task, length, options.held_out) for length in lengths for task in NEEDLE_TASKS}
        trainer = Trainer(options, device)
        clock = Clock(options.seconds, options.steps, trainer.begin)
        if device.type == "cuda":
            choose_attention((2, 9, min(16384, options.longest), 64), log)
        feed.fill()
        for future in samples.values():
            future.result()
        clock = Clock(options.seconds, options.steps, trainer.begin)
        log(f"the model and {len(samples)} sets of held-out samples are ready; {sum(p.numel() for p in trainer.parameters) / 1e6:.2f} million parameters")
        return _loop(trainer, feed, clock, samples, Progress(trainer, clock, log, lines))
    finally:
        feed.close()


class Progress:
    """What the steps since the last line of the log came to, and the log itself."""

    def __init__(self, trainer: Trainer, clock: Clock, log: Any, lines: list[str]) -> None:
        self.trainer, self.clock, self.log, self.options = trainer, clock, log, trainer.options
        options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.options).items()}
        self.result: dict[str, Any] = dict(options=options, torch=torch.__version__, losses=[], exact_match=[], lines=lines)
        self.slowest = self.measuring = 0.0
        self._begin()

    def _begin(self) -> None:
        self.sums: dict[str, float] = {}
        self.count, self.tokens, self.since = 0, 0, self.clock.elapsed()

    def step(self, batch: Batch, numbers: dict[str, float], seconds: float, waited: float) -> None:
        """One step was done in ``seconds``, of which it waited for its batch for ``waited``."""
        self.clock.step += 1
        # The first steps are slow; what a step takes now is what counts.
        self.slowest = max(0.9 * self.slowest, seconds)
        self.count, self.tokens = self.count + 1, self.tokens + batch.ids.size
        for key, value in {**numbers, "length": batch.length, "waited": waited}.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        passed = self.clock.elapsed() - self.since
        if passed < self.options.log_seconds and self.clock.step != self.options.steps:
            return
        mean = {key: round(value / self.count, 4) for key, value in self.sums.items()}
        speed = self.tokens / max(passed, 1e-9)
        self.result["losses"].append(dict(step=self.clock.step, seconds=round(self.clock.elapsed(), 1), tokens_per_second=round(speed), **mean))
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.trainer.device.type == "cuda" else 0.0
        self.log(
            f"{100 * self.clock.fraction():3.0f}% step {self.clock.step}: answers {mean['answers']:.3f}, text {mean['text']:.3f}, gradient {mean['norm']:.2f}, "
            f"length {mean['length']:.0f}, {speed / 1000:.1f}K tokens/s, waited {self.sums['waited']:.1f} s, {memory:.0f} GiB"
        )
        self._begin()

    def measure(self, samples: dict[tuple[str, int], Future[Any]], fraction: float) -> None:
        """Exact match of the held-out samples by length and task; then the log is written."""
        start = time.monotonic()
        table: dict[str, dict[str, float]] = {}
        for (task, length), future in samples.items():
            table.setdefault(str(length), {})[task] = round(self.trainer.exact(*future.result(), length), 3)
        means = {length: sum(row.values()) / len(row) for length, row in table.items()}
        self.log("exact match: " + ", ".join(f"{length} {100 * mean:.0f}%" for length, mean in means.items()))
        self.measuring = time.monotonic() - start
        self.since += self.measuring
        self.result["exact_match"].append(dict(fraction=round(fraction, 3), seconds=round(self.clock.elapsed(), 1), step=self.clock.step, **table))
        self.result.update(steps=self.clock.step, skipped=self.trainer.skipped, seconds=round(self.clock.elapsed(), 1))
        (self.options.output / "log.json").write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def time_left(self) -> bool:
        """Whether there is time for another step besides the last measure and the files."""
        needed = 2 * self.slowest + self.measuring + 2
        return self.clock.fraction() < 1 and (self.clock.elapsed() + needed) / self.options.seconds + self.trainer.begin < 1


def _loop(trainer: Trainer, feed: Feed, clock: Clock, samples: dict[Any, Future[Any]], progress: Progress) -> dict[str, Any]:
    due = [part for part in MEASURED_AT if trainer.begin <= part < 1]
    half_saved = trainer.begin >= 0.5
    try:
        while progress.time_left():
            fraction = clock.fraction()
            if due and fraction >= due[0]:
                due = [part for part in due if part > fraction]
                progress.measure(samples, fraction)
                continue
            if not half_saved and fraction >= 0.5:
                half_saved = True
                trainer.save("half.safetensors", fraction)
            start = time.monotonic()
            batch = feed.next()
            waited = time.monotonic() - start
            numbers = trainer.step(batch, rate_at(fraction), progress.log)
            progress.step(batch, numbers, time.monotonic() - start, waited)
    except BaseException:
        # What was learnt until here must not be lost with the run.
        trainer.save("stopped.safetensors", clock.fraction())
        raise
    trainer.save("adapter.safetensors", 1.0)
    progress.measure(samples, 1.0)
    _print_table(progress.result)
    return progress.result


def _print_table(result: dict[str, Any]) -> None:
    last = {k: v for k, v in result["exact_match"][-1].items() if isinstance(v, dict)}
    print(f"{result['steps']} steps in {result['seconds']} s, {result['skipped']} skipped; exact match of held-out samples, %, at the end:")
    print("task".ljust(18) + "".join(length.rjust(8) for length in last))
    for task in NEEDLE_TASKS:
        print(task.ljust(18) + "".join(f"{100 * row[task]:8.0f}" for row in last.values()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, default=420.0, help="of training, loading not counted")
    parser.add_argument("--steps", type=int, default=0, help="most steps; 0: as many as the time allows")
    parser.add_argument("--theta", type=float, default=1e6, help="rotary base; the model came with 100000")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest documents")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters of attention")
    parser.add_argument("--mlp-rank", type=int, default=16, help="of the adapters of the feed-forward layers")
    parser.add_argument("--lr", type=float, default=1e-3, help="height of the learning rate")
    parser.add_argument("--up-rate", type=float, default=1.0, help="learning rate of the factor that starts at zero, as a multiple of the other's")
    parser.add_argument("--micro-tokens", type=int, default=65536, help="tokens of one forward pass; halved where memory is short")
    parser.add_argument("--step-scale", type=float, default=1.0, help="multiplies the tokens of a step")
    parser.add_argument("--held-out", type=int, default=3, help="samples of each task and length that are measured")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)), help="processes that make documents; 0: this one does")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="adapter to go on from; the optimiser starts afresh")
    parser.add_argument("--start", type=float, help="part of the time at which a resumed training begins; default: what the adapter had reached")
    parser.add_argument("--log-seconds", type=float, default=LOG_SECONDS, help="between lines of the log")
    options = parser.parse_args(arguments)
    if options.longest < 1024 or options.longest > 32768:
        raise KvskimError(f"--longest is {options.longest}; it must be from 1024 to 32768")
    for name in ("seconds", "lr", "step_scale", "rank", "mlp_rank", "held_out", "micro_tokens"):
        if getattr(options, name) <= 0:
            raise KvskimError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be greater than 0")
    if not (Path(options.model) / "config.json").exists():
        raise KvskimError(f"there is no model at {options.model}: give a Hugging Face folder of SmolLM2-135M-Instruct")
    return options


if __name__ == "__main__":
    try:
        train(parse())
    except KvskimError as error:
        sys.exit(f"error: {error}")
