"""Built-in texts to calibrate on: documentation, code, and a mix of other kinds of text.

Documentation and code come from modules of Python's standard library that no built-in text of the evaluation or of the demo uses; the mix is made here,
the same every time: records, logs, tables, settings, dialogue, Markdown and several languages.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvskim.demo.text import docstrings_of, tokenize

DOCSTRING_MODULES = (
    "optparse", "difflib", "heapq", "statistics", "textwrap", "configparser", "csv", "threading", "fractions", "random", "string", "shelve",
    "http.client", "urllib.request", "email.message", "mailbox", "zipfile", "tarfile", "unittest.mock", "concurrent.futures", "ipaddress", "calendar",
)
CODE_MODULES = ("tarfile", "logging", "zipfile", "statistics", "difflib", "configparser", "optparse", "ipaddress", "mailbox", "calendar")
MODULE_HEAD = 3000
"""Characters at the beginning of a module that are left out."""
LEAST_PART = 4000
"""Characters taken of each module, at least."""
LANGUAGES = (
    "Der Bäcker öffnet seinen Laden um fünf Uhr, lange bevor die ersten Züge fahren. Im Winter brennt dann nur in seiner Straße Licht. Er sagt, dass er die "
    "Stille mag, weil er darin den Teig hören kann. Um sieben kommen die Schulkinder, und mit der Ruhe ist es vorbei.",
    "Le marché se tient le jeudi sur la place de l'église. On y trouve des légumes, du fromage et parfois de vieux livres. Ma tante discute avec tous les "
    "marchands, mais elle n'achète presque rien. Quand il pleut, les vendeurs ferment plus tôt et rentrent chez eux.",
    "El tren cruza el valle dos veces al día. Desde la ventana se ven huertas, un molino abandonado y, a lo lejos, la nieve de la sierra. Los viajeros de "
    "siempre ya no miran; los nuevos sacan fotos hasta que llega el túnel.",
    "O rio cresceu durante a noite e levou a ponte de madeira. Os vizinhos esperaram até à tarde para medir os estragos. Ninguém se feriu, mas a escola ficou "
    "fechada três dias e o correio chegou de barco.",
    "Il falegname misura due volte e taglia una volta sola. Nella sua bottega ogni attrezzo ha un posto, e chi lo prende deve rimetterlo. Così, dice, anche al "
    "buio si trova quello che serve.",
    "Летом мы жили у озера, в доме с зелёной крышей. По утрам дед уходил ловить рыбу, а бабушка ставила самовар. К обеду собирались соседи и долго спорили о "
    "погоде, о ценах и о том, будет ли осень тёплой.",
    "山脚下有一个小村庄，村民大多种茶。春天采茶的时候，全家人天不亮就上山，中午才回来。老人说，好茶要看天气，也要看手艺，两样缺一样都不行。",
    "駅前の古い喫茶店は、朝六時に開く。常連の客は新聞を読みながら、ゆっくりと珈琲を飲む。店主はほとんど話さないが、誰が何を頼むかをすべて覚えている。",
    "يفتح المقهى أبوابه مع شروق الشمس، ويجلس كبار السن حول الطاولات الخشبية يتبادلون الأخبار. "
    "في المساء يمتلئ المكان بالطلاب، فتعلو الأصوات حتى ساعة متأخرة من الليل.",
)
_NAMES = ("Aldo", "Berit", "Chandra", "Dmitri", "Eskil", "Farah", "Gwen", "Hiro", "Ilse", "Jamal", "Katya", "Luis")
_PLACES = ("harbour", "north depot", "library", "workshop", "orchard", "station 4", "greenhouse", "archive", "pier", "mill")
_GOODS = ("copper wire", "seed potatoes", "printer paper", "bicycle chains", "lamp oil", "window glass", "flour", "cedar boards")
_ACTIONS = ("checked the pumps", "moved the crates", "painted the fence", "counted the stock", "wrote to the owner", "fixed the roof", "called the driver")
_LEVELS = ("INFO", "DEBUG", "WARNING", "ERROR")


def _records(r: random.Random) -> str:
    rows: list[dict[str, Any]] = [
        dict(
            id=r.randrange(10**6), name=r.choice(_NAMES), place=r.choice(_PLACES), active=r.random() < 0.5, score=round(r.random() * 100, 2),
            tags=r.sample(_GOODS, 2), parent=r.choice((None, r.randrange(1000))),
        )
        for _ in range(4)
    ]
    return json.dumps(rows, indent=r.choice((None, 2)))


def _log(r: random.Random) -> str:
    lines = [
        f"2019-{r.randrange(1, 13):02}-{r.randrange(1, 29):02}T{r.randrange(24):02}:{r.randrange(60):02}:{r.randrange(60):02}.{r.randrange(1000):03}Z "
        f"{r.choice(_LEVELS)} [worker-{r.randrange(16)}] {r.choice(_PLACES).replace(' ', '.')}: request {r.getrandbits(48):012x} took {r.randrange(5000)} ms, "
        f"{r.randrange(1 << 20)} bytes from 10.{r.randrange(256)}.{r.randrange(256)}.{r.randrange(256)}:{r.randrange(1024, 65536)}"
        for _ in range(6)
    ]
    return "\n".join(lines)


def _table(r: random.Random) -> str:
    lines = ["item,place,count,price,total"]
    for _ in range(8):
        count, price = r.randrange(1, 400), r.randrange(100, 99_999) / 100
        lines.append(f"{r.choice(_GOODS)},{r.choice(_PLACES)},{count},{price:.2f},{count * price:.2f}")
    return "\n".join(lines)


def _markdown(r: random.Random) -> str:
    points = "\n".join(f"- **{r.choice(_GOODS)}**: {r.choice(_NAMES)} {r.choice(_ACTIONS)} (see [{r.choice(_PLACES)}](#{r.randrange(90)}))" for _ in range(4))
    return (
        f"## {r.randrange(1, 30)}. The {r.choice(_PLACES)}\n\n{points}\n\n| day | {r.choice(_NAMES)} | {r.choice(_NAMES)} |\n|---|---|---|\n"
        f"| Monday | {r.randrange(99)} | {r.random():.4f} |\n| Friday | {r.randrange(99)} | {r.random():.4f} |\n\n"
        f"```sh\ncp -r ./{r.choice(_PLACES).split()[0]} /srv/{r.choice(_NAMES).lower()}-{r.randrange(100)}\n```"
    )


def _dialogue(r: random.Random) -> str:
    first, second = r.sample(_NAMES, 2)
    return "\n".join([
        f"{first}: Did anybody see who {r.choice(_ACTIONS)} at the {r.choice(_PLACES)}?",
        f"{second}: I think it was {r.choice(_NAMES)}. We were out of {r.choice(_GOODS)}, so nothing else could be done before {r.randrange(1, 12)} o'clock.",
        f"{first}: That makes {r.randrange(2, 90)} this month. \"Never again,\" you said, and yet here we are.",
        f"{second}: You could have {r.choice(_ACTIONS)} yourself! What would it have cost, {r.randrange(5, 500)} euros?",
        f"{first}: Fine. I will ask at the {r.choice(_PLACES)} and tell you tomorrow.",
    ])


def _settings(r: random.Random) -> str:
    lines = [f"[{r.choice(_PLACES).replace(' ', '_')}]"]
    for name in ("limit", "mode", "rate", "retry"):
        value = r.choice((r.randrange(10**5), "true", "off", round(r.random(), 5)))
        lines.append(f"{r.choice(_GOODS).replace(' ', '_')}.{name} = {value}")
    lines.append(f'key = "{r.getrandbits(64):016x}"')
    lines.append(f"url = https://example.org/{r.choice(_NAMES).lower()}?page={r.randrange(900)}&size={r.randrange(64)}")
    return "\n".join(lines)


KINDS: tuple[Callable[[random.Random], str], ...] = (_records, _log, _table, _markdown, _dialogue, _settings)


def mixed_text(passages: int) -> str:
    """Passages of all kinds in turn, in every round one of another language. The text of more passages begins with that of fewer."""
    r = random.Random(0)
    parts = []
    for number in range(passages):
        turn, kind = divmod(number, len(KINDS) + 1)
        parts.append(LANGUAGES[turn % len(LANGUAGES)] if kind == len(KINDS) else KINDS[kind](r))
    return "\n\n".join(parts)


def calibration_texts(characters: int) -> list[str]:
    """Documentation, code and a mix of other text, each of about ``characters`` characters or as many as there are."""
    files = [inspect.getsourcefile(importlib.import_module(name)) for name in CODE_MODULES]
    # A part of every module, where the text is long: their vocabularies differ. They begin with licences and imports.
    share = max(LEAST_PART, -(-characters // len(CODE_MODULES)))
    parts = [Path(file).read_text(encoding="utf-8", errors="ignore")[MODULE_HEAD : MODULE_HEAD + share] for file in files if file]
    return [docstrings_of(DOCSTRING_MODULES)[:characters], "\n\n".join(parts)[:characters], mixed_text(characters // 150)[:characters]]


def calibration_ids(tokenizer: Any, tokens: int, text: str | None = None) -> list[list[int]]:
    """Token sequences to calibrate on, about ``tokens`` tokens together: the user's text, or the built-in ones."""
    if text is not None:
        # More characters a token than any tokenizer makes of a long text: it bounds the work on one.
        return [tokenize(tokenizer, text[: 10 * tokens])[:tokens]]
    share = tokens // 3
    return [tokenize(tokenizer, source)[:share] for source in calibration_texts(6 * share)]
