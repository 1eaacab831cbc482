"""All tasks.

- `noisy`: the quickstart as it is; 30 % of the training answers are wrong. Others are the same with a teacher of another tokenizer,
  or with a student that has learnt from the rows alone before, as there is of `language`.
- `clean`: the same questions with right answers, and few rows.
- `half of SmolLM2` and others: pretrained models.
- `language`: the next tokens of real text, with one teacher or two. `shift`: the student sees one domain of it, and is measured
  on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from distill_rl.demo.recipe import CROSS, RECIPE
from tests.bench.methods.settings import FROM_GEMMA, HALF, HALF_FROM_GEMMA, LANGUAGES, ROWS
from tests.bench.methods.tasks.base import Task
from tests.bench.methods.tasks.language import Language
from tests.bench.methods.tasks.pretrained import Pretrained
from tests.bench.methods.tasks.questions import Questions
from tests.bench.methods.tasks.text import LIBRARY, REFERENCE

_STEMS = replace(CROSS, folder="stems-seed", teacher_tokenizer="stems")
_LINES = replace(CROSS, folder="stem-lines-seed", teacher_tokenizer="stem lines")
TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Questions("noisy", RECIPE),
            Questions("noisy, beside TRL", RECIPE),
            Questions("noisy, few shared tokens", CROSS),
            Questions("noisy, most tokens shared", _STEMS),
            Questions("noisy, same template", _LINES),
            Questions("noisy, trained student", RECIPE, pretrained=True),
            Questions("noisy, few shared tokens, trained student", CROSS, pretrained=True),
            *(Questions(f"clean, {rows} rows", RECIPE, clean=True, rows=rows) for rows in ROWS),
            Language("language"),
            Language("language, most tokens shared", ("4k",)),
            Language("language, few shared tokens", ("1k, spaces apart",)),
            Language("language, most tokens shared, trained student", ("4k",), pretrained=True),
            Language("language, two teachers", ("4k", "1k, spaces apart")),
            Language("language, two alike", ("2k", "2k")),
            Language("shift", train=(REFERENCE,), measured=(LIBRARY,)),
            Pretrained(HALF, "half", "smollm2"),
            Pretrained(HALF_FROM_GEMMA, "half", "gemma"),
            Pretrained(FROM_GEMMA, "whole", "gemma"),
            Pretrained(LANGUAGES, "whole", "gemma", "languages"),
        )
    }
)
