"""Seed -> Program. The same seed gives the same program."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from tests.fuzz.catalogue import (
    ACTIVATION_DOORS,
    BLOCKS,
    COUNTED_DOORS,
    FEATURES,
    INFERENCE_DOOR,
    READS,
    SILENT_DOORS,
    Template,
)
from tests.fuzz.program import INSIDE, LOSSES, Frame, Part, Program

WEIGHTS = {  # how often a part is of a feature; others 1
    "pointwise ops": 6,
    "matrix products": 6,
    "norms": 3,
    "convolutions": 3,
    "views": 3,
    "in-place ops": 4,
    "random numbers": 3,
    "custom functions": 2,
    "hooks": 2,
    "changed buffers": 4,
    "changed activations": 0.5,
    "linear algebra": 0.5,
    "torch.func": 0.5,
    "unusual tensors": 0.5,
    "statistics of norms": 0.7,
}
CONDITIONS = ("self.t >= 2", "self.t >= 3", "self.t % 2 == 1", "self.t != 2")
BLOCK_SHARE = 0.06  # of parts
BRANCH_SHARE = 0.03  # of parts, that only some steps have
SKIP_SHARE = 0.25  # of parts, that do not read the last one: branches, unused heads
NUM_STEPS = (5, 6)


class Generator:
    """Draws one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"outcore fuzz {seed}")
        self.seed = seed
        self.num_parts = 0

    def program(self) -> Program:
        size = self.random.choice((3, 4, 5, 6, 8, 12))
        parts = self.parts(size, [0], inside=False)
        uids = [part.uid for part in parts]
        outputs = tuple(self.random.choice(uids) for _ in range(self.random.choice((0, 0, 0, 1, 2))))
        frame = self.frame()
        num_steps = 6 if frame.accumulate > 1 or len(frame.rows) > 1 else self.random.choice(NUM_STEPS)
        return Program(self.seed, tuple(parts), frame, outputs, num_steps)

    def parts(self, size: int, known: list[int], *, inside: bool) -> list[Part]:
        parts: list[Part] = []
        for _ in range(size):
            recent = known[-1] if self.random.random() > SKIP_SHARE else self.random.choice(known)
            inputs = recent, self.random.choice(known)
            is_block = not inside and self.random.random() < BLOCK_SHARE
            part = self.block(inputs) if is_block else self.part(inputs, inside=inside)
            if self.random.random() < BRANCH_SHARE:
                part = replace(part, only=self.random.choice(CONDITIONS))
            parts.append(part)
            known = [*known, part.uid]
        return parts

    def part(self, inputs: tuple[int, int], *, inside: bool) -> Part:
        features = [*FEATURES, "changed buffers", "changed activations"]
        (feature,) = self.random.choices(features, [WEIGHTS.get(name, 1) for name in features])
        if feature == "changed buffers":
            return self.changed_buffer(inputs, inside=inside)
        if feature == "changed activations":
            return self.changed_activation(inputs, inside=inside)
        name = self.random.choice([*FEATURES[feature]])
        return self.drawn(f"{name} ({feature})", feature, FEATURES[feature][name], inputs, inside=inside)

    def drawn(self, name: str, feature: str, template: Template, inputs: tuple[int, int], *, inside: bool) -> Part:
        self.num_parts += 1
        place = "now" if inside else self.random.choice(template.places)
        own = "{h}.detach()[:32]" if place in ("now", "end") and self.random.random() < 0.5 else None
        write = template.write.replace("{d}", own or "torch.full((32, 32), 0.1 * self.t)")
        return Part(
            self.num_parts,
            name,
            feature,
            self.choose(template.forward),
            inputs,
            self.choose(template.init),
            write,
            place,
            self.random.choice(("True", *CONDITIONS)) if write else "True",
        )

    def choose(self, text: str) -> str:
        return re.sub(r"\[\[(.*?)\]\]", lambda found: self.random.choice(found[1].split("|")), text)

    def changed_buffer(self, inputs: tuple[int, int], *, inside: bool) -> Part:
        silent = self.random.random() < 0.5
        door = self.random.choice([*(SILENT_DOORS if silent else {**COUNTED_DOORS, "inference": ""})])
        reads = [read for read, saves in READS.items() if silent or not saves]
        init = "self.register_buffer('{n}', torch.randn(32, 32) * 0.2)"
        write = {**SILENT_DOORS, **COUNTED_DOORS, "inference": INFERENCE_DOOR}[door]
        if door == "inference":
            init = "with torch.inference_mode(): self.{n} = torch.randn(32, 32) * 0.2"
        elif door == "shared numpy":
            init = "self.{n}_array = np.full((32, 32), 0.3, np.float32); self.{n} = torch.from_numpy(self.{n}_array)"
        template = Template(self.random.choice(reads), init, write)
        return self.drawn(f"buffer changed by {door}", f"buffers through {door}", template, inputs, inside=inside)

    def changed_activation(self, inputs: tuple[int, int], *, inside: bool) -> Part:
        door = self.random.choice([*ACTIVATION_DOORS])
        makes = self.random.choice(("{o} = torch.tanh({h})", "{o} = {h} * {h}.sigmoid()", "{o} = torch.sin({h} * 1.5)"))
        template = Template(makes, "", ACTIVATION_DOORS[door], ("now", "end"))
        return self.drawn(f"activation changed by {door}", "changed activations", template, inputs, inside=inside)

    def block(self, inputs: tuple[int, int]) -> Part:
        name = self.random.choice([*BLOCKS])
        self.num_parts += 1
        uid = self.num_parts
        inner = tuple(self.parts(self.random.choice((1, 2, 3)), [inputs[0]], inside=True))
        return Part(uid, name, f"block {name}", BLOCKS[name], inputs, inner=inner)

    def frame(self) -> Frame:
        chance = self.random.random
        name = "plain" if chance() < 0.4 else self.random.choice([*INSIDE])
        rows = self.random.choice((64, 64, 96, 128))
        return Frame(
            name,
            self.random.choice([*LOSSES]),
            accumulate=2 if chance() < 0.12 else 1,
            rows=(rows, rows, self.random.choice((64, 80, 112))) if chance() < 0.1 else (rows,),
            momentum=0.9 if chance() < 0.3 else 0.0,
            updates_inside=chance() < 0.15,
            input_needs_grad=chance() < 0.1,
            prepares=chance() < 0.15,
            clips=chance() < 0.1,
            zeroes=chance() < 0.1,
        )


def generate(seed: int, scale: int = 1) -> Program:
    """The program of a seed. `scale`: how many times as many rows its tensors have."""
    program = Generator(seed).program()
    rows = tuple(scale * rows for rows in program.frame.rows)
    return replace(program, frame=replace(program.frame, rows=rows))
