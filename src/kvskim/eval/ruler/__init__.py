"""RULER (Hsieh et al. 2024, arXiv 2404.06654): synthetic questions about contexts of any length, written afresh from the paper's task definitions.

The tasks, their parameters and their scores are the paper's; sentences, words and background texts are ours, so scores compare within this harness and
not digit for digit with published ones. The two question-answering tasks use generated facts in the place of SQuAD and HotpotQA. ``kv_recall`` is an
addition: associative recall (Arora et al. 2023, arXiv 2312.04927), easy enough for small models.
"""

from kvskim.eval.ruler.tasks import TASKS, Task, make_samples

__all__ = ["TASKS", "Task", "make_samples"]
