"""All tasks by name, and the mixtures that training draws from."""
from counting import cwe, fwe
from dialogues import agents, memory
from documents import coref, qa
from lookups import link, niah, table
from multiturn import multiturn
from passages import copy, fewshot, lm
from samples import Mode, assemble
from variables import vt

BOOT = {"lm": 0.15, "table": 0.55, "link": 0.06, "niah": 0.13, "vt": 0.11}
HOPS = {"lm": 0.10, "link": 0.20, "vt": 0.26, "qa": 0.20, "niah": 0.09, "table": 0.04, "coref": 0.05,
        "agents": 0.04, "memory": 0.02}
MIX = {"lm": 0.12, "table": 0.02, "link": 0.03, "niah": 0.13, "vt": 0.165, "qa": 0.195, "coref": 0.07, "memory": 0.05,
       "agents": 0.05, "cwe": 0.03, "fwe": 0.03, "copy": 0.02, "fewshot": 0.05, "multiturn": 0.04}
TASKS = {"niah": niah, "table": table, "link": link, "vt": vt, "qa": qa, "coref": coref, "memory": memory,
         "agents": agents, "cwe": cwe, "fwe": fwe, "copy": copy, "fewshot": fewshot}
LEAST = {"cwe": 256, "fwe": 256, "copy": 256, "multiturn": 192, "fewshot": 256, "qa": 160, "coref": 128, "agents": 128}
TRAIN = Mode(train=True)


def draw(rng, w, length, mix=MIX):
    """One training sample of at most `length` tokens."""
    while True:
        name = rng.choices(list(mix), list(mix.values()))[0]
        if length < LEAST.get(name, 0):
            continue
        if name == "lm":
            return lm(rng, w, length)
        if name == "multiturn":
            s = multiturn(rng, w, length, TRAIN)
            if s is None:
                continue
            return s
        plan = TASKS[name](rng, w, length, TRAIN)
        if plan is None:
            continue
        # drop questions until the sample fits
        while plan is not None:
            s = assemble(plan, rng, w, length, TRAIN)
            if s is not None:
                return s
            if len(plan.qas) > 1:
                plan.qas = plan.qas[:max(1, len(plan.qas) * 2 // 3)]
            else:
                plan = None
