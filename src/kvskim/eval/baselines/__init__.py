"""Published methods to compare with, written from their papers as references: what each is and where it deviates is in docs/baselines.md."""

from __future__ import annotations

from kvskim.eval.baselines.base import Baseline
from kvskim.eval.baselines.lazyeviction import LazyEviction
from kvskim.eval.baselines.rkv import RKV
from kvskim.eval.baselines.rocketkv import RocketKV
from kvskim.eval.baselines.shadowkv import ShadowKV
from kvskim.eval.baselines.snapkv import SnapKV
from kvskim.eval.baselines.triattention import TriAttention

BASELINES: dict[str, type[Baseline]] = {cls.name: cls for cls in (ShadowKV, RocketKV, SnapKV, RKV, TriAttention, LazyEviction)}
"""By the name that commands use."""

__all__ = ["BASELINES", "Baseline"]
