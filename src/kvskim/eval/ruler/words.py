"""Words, names and values that the tasks are made of. Everything comes from a seeded generator."""

from __future__ import annotations

import random
import re
import uuid
from functools import cache

from kvskim.eval.texts import prose


def _split(text: str) -> list[str]:
    return text.split()


_ADJECTIVES = _split("""
able ancient arctic ashen autumn bitter blazing blunt bold bright brisk broken bronze calm careful cheerful chilly clever cloudy coastal copper cosmic
crimson curious daring dim distant double drowsy dusty eager early earthy elder electric emerald fading faint famous fearless feral fertile final firm
floral foggy foreign formal fragile frosty gentle giant gilded glad golden grand grassy hardy hasty hidden hollow humble hungry idle indigo inner
ivory jagged jolly keen kind lazy leafy lively lonely loud loyal lucky lunar marble mellow merry mild mighty misty modern mossy muted narrow neat
nimble noble northern odd olive opal open pale patient plain polar polite proud purple quick quiet rapid rare remote restless rigid robust rough royal
rural rusty sacred sandy scarlet secret shady sharp shiny silent silver simple sleepy smoky smooth snowy solar solid sour spare spiral steady steep
stormy sturdy subtle sunny swift tall tame tender tidy timid tiny tranquil tropical upper urban vague vast velvet violet vivid warm wary western wild
windy wise witty wooden young zealous
""")
_NOUNS = _split("""
acorn airport almond anchor antler anvil apricot archer armchair arrow atlas attic avenue badger bagpipe bakery balcony bamboo banjo barley barrel
basin basket beacon beaver bicycle blanket blossom bobcat bonfire bottle boulder bracelet bridge bucket buffalo bugle butter cabin cactus camel candle
canoe canyon caravan carpet castle cathedral cavern cedar cello chapel cherry chimney cinema circus clarinet cliff clover cobra comet compass coral
cottage cradle crater cricket crystal curtain cyclone daisy dolphin donkey dragon drum eagle easel elbow ember engine falcon feather fern ferry fiddle
flute forest fossil fountain gallery garden garlic geyser ginger giraffe glacier goblet gondola granite grotto guitar hammer harbor harp hazel hedge
helmet heron hill honey horizon iceberg island ivy jacket jaguar jasmine jungle kayak kettle kitchen kite ladder lagoon lantern lemon leopard library
lighthouse lily lizard lobster locket magnet mango maple market meadow medal melon meteor mirror monsoon mountain mushroom napkin needle nutmeg oasis
ocean octopus orchard orchid otter oyster paddle palace panther parrot peacock pebble pelican pencil pepper piano pigeon pillow pine planet plateau
plum pocket pony prairie prism puzzle quarry quartz rabbit raccoon radish raven reef ribbon river robin rocket saddle salmon sandal scarf seashell
shadow shovel siren sled sparrow spider spruce squirrel stadium statue sunset swan tavern temple thistle thunder tiger timber tractor trumpet tulip
tunnel turtle umbrella valley vessel village violin volcano wagon walnut walrus waterfall whale willow window wolf yacht zebra
""")
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def key_phrases(random_: random.Random, count: int) -> list[str]:
    """``count`` different keys, such as ``misty-harbor``; with two adjectives where there are not enough."""
    pairs = len(_ADJECTIVES) * len(_NOUNS)
    total = pairs if count <= pairs else pairs * len(_ADJECTIVES)
    if count > total:
        raise ValueError(f"{count} different keys were asked for; there are {total}")
    keys = []
    for number in random_.sample(range(total), count):
        first, rest = divmod(number, pairs)
        adjective, noun = divmod(rest, len(_NOUNS))
        key = f"{_ADJECTIVES[adjective]}-{_NOUNS[noun]}"
        keys.append(key if total == pairs else f"{_ADJECTIVES[first]}-{key}")
    return keys


def number_value(random_: random.Random) -> str:
    """Seven digits."""
    return str(random_.randrange(1_000_000, 10_000_000))


def uuid_value(random_: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=random_.getrandbits(128), version=4))


def made_up_names(random_: random.Random, count: int, syllables: int = 3) -> list[str]:
    """``count`` different capitalised names that mean nothing, such as ``Velora``."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(random_.choice(_SYLLABLES) for _ in range(syllables)).capitalize()] = None
    return list(names)


def variable_names(random_: random.Random, count: int) -> list[str]:
    """``count`` different names of five capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(random_.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))] = None
    return list(names)


@cache
def _dictionary() -> tuple[str, ...]:
    found = set(re.findall(r"\b[a-z]{4,12}\b", prose()))
    return tuple(sorted(found | set(_ADJECTIVES) | set(_NOUNS)))


def plain_words(random_: random.Random, count: int) -> list[str]:
    """``count`` different words: of a dictionary as far as it goes, then made up."""
    words = list(_dictionary())
    random_.shuffle(words)
    words = words[:count]
    if len(words) < count:
        known = set(words)
        extra = (name.lower() for name in made_up_names(random_, 2 * (count - len(words)) + 10, 4))
        words += [word for word in extra if word not in known][: count - len(words)]
    return words
