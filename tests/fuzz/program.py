"""Program -> Python source.

A program is data: a model made of parts, each a few lines from one variable of R x 32 numbers to the next, and a frame,
the code of a training step around it. Because every part gives what it is given, any of them can be taken out and what
remains is a program: that is how a failing one shrinks, and how a feature is switched off.

In a part's lines `{o}` is what it makes, `{h}` and `{k}` what it reads, `{n}` an attribute of the model of its own,
`{f}` the function of a block. The model's `self.t` is the number of the step.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

WIDTH = 32  # of every activation; rows are multiples of 16, so that one is at least 6 KiB: larger than what is "small"


@dataclass(frozen=True)
class Part:
    """A few lines of the model."""

    uid: int
    name: str
    feature: str
    forward: str  # lines that make {o} from {h} and {k}; {body} is the call of a block's function
    inputs: tuple[int, int] = (0, 0)  # uids of {h} and {k}
    init: str = ""
    write: str = ""  # lines that change something that was read
    place: str = "now"  # of `write`: now, end (of the forward), late (before the backward), between (the steps)
    when: str = "True"  # `write` happens
    only: str = ""  # the whole part happens; otherwise {o} is {h}
    inner: tuple[Part, ...] = ()  # of a block, which is called as a function

    @property
    def features(self) -> set[str]:
        own = {self.feature} | ({"branching steps"} if self.only else set())
        return own.union(*(part.features for part in self.inner))


@dataclass(frozen=True)
class Frame:
    """The training step around the model; every field but the name can be put back to its default."""

    name: str = "plain"
    loss: str = "square"
    accumulate: int = 1  # steps per update
    rows: tuple[int, ...] = (64,)  # of the input, in turn
    momentum: float = 0.0
    updates_inside: bool = False  # the optimizer steps inside the `with`
    input_needs_grad: bool = False
    prepares: bool = False  # ops before the model is called
    clips: bool = False
    zeroes: bool = False  # zero_grad(set_to_none=False)

    @property
    def features(self) -> set[str]:
        found = {f"frame {self.name}"}
        found |= {"accumulation"} if self.accumulate > 1 else set()
        return found | ({"changing sizes"} if len(set(self.rows)) > 1 else set())


@dataclass(frozen=True)
class Program:
    seed: int
    parts: tuple[Part, ...]
    frame: Frame = Frame()
    outputs: tuple[int, ...] = ()  # uids of what the forward returns beside the last part's
    num_steps: int = 5

    @property
    def features(self) -> set[str]:
        return self.frame.features.union(*(part.features for part in self.parts))

    def everything(self) -> Iterator[Part]:
        for part in self.parts:
            yield from _deep(part)

    def without(self, uids: set[int]) -> Program:
        """Takes parts out: who read them reads what they read. A block is replaced by what it contains."""
        instead: dict[int, int] = {}
        parts = tuple(_without(self.parts, uids, instead))
        outputs = dict.fromkeys(_resolve(uid, instead) for uid in self.outputs)
        return dataclasses.replace(self, parts=parts, outputs=tuple(outputs))


def _deep(part: Part) -> Iterator[Part]:
    yield part
    for inner in part.inner:
        yield from _deep(inner)


def _resolve(uid: int, instead: dict[int, int]) -> int:
    while uid in instead:
        uid = instead[uid]
    return uid


def _without(parts: tuple[Part, ...], uids: set[int], instead: dict[int, int]) -> Iterator[Part]:
    for part in parts:
        inputs = _resolve(part.inputs[0], instead), _resolve(part.inputs[1], instead)
        inner = tuple(_without(part.inner, uids, instead))
        if part.uid in uids or (part.inner and not inner):
            yield from inner
            instead[part.uid] = inner[-1].uid if inner else inputs[0]
        else:
            yield dataclasses.replace(part, inputs=inputs, inner=inner)


# -- source -----------------------------------------------------------------------------------------------------------


def source(program: Program) -> str:
    """The class Net and the function `step(m, opt, t, limited, data)`, which returns what is compared."""
    init: list[str] = []
    body: list[str] = []
    ends: list[str] = []
    late: list[str] = []
    between: list[str] = []
    for part in program.everything():
        init += _lines(part.init, part)
    for part in program.parts:
        body += _forward(part, ends, late, between)
    last = program.parts[-1].uid if program.parts else 0
    returned = "".join(f"v{uid}, " for uid in dict.fromkeys((last, *program.outputs)))
    text = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    text += ["        self.t, self.log = 0, []", *_indent(["self.stem = nn.Linear(32, 32)", *init], 8)]
    text += ["    def forward(self, x, *_):", "        v0 = self.stem(x)", *_indent(body + ends, 8)]
    text += [f"        return {returned}"]
    for name, lines in (("late", late), ("between", between)):
        text += [f"    def {name}(self):", *_indent(lines or ["pass"], 8)]
    return "\n".join([*text, "", *_step(program.frame), ""])


def _indent(lines: list[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def _lines(text: str, part: Part) -> list[str]:
    names = {"o": f"v{part.uid}", "h": f"v{part.inputs[0]}", "k": f"v{part.inputs[1]}", "n": f"p{part.uid}"}
    for key, value in names.items():
        text = text.replace("{" + key + "}", value)
    return textwrap.dedent(text).strip("\n").splitlines() if text else []


def _forward(part: Part, ends: list[str], late: list[str], between: list[str]) -> list[str]:
    lines: list[str] = []
    if part.inner:
        first = part.inner[0].inputs[0]
        inside = [line for inner in part.inner for line in _forward(inner, ends, late, between)]
        lines += [f"def f{part.uid}(v{first}):", *_indent([*inside, f"return v{part.inner[-1].uid}"], 4)]
    lines += [line.replace("{f}", f"f{part.uid}") for line in _lines(part.forward, part)]
    if part.write:
        write = [f"if {part.when}:", *_indent(_lines(part.write, part), 4)]
        {"now": lines, "end": ends, "late": late, "between": between}[part.place].extend(write)
    if part.only:
        other = f"v{part.uid} = v{part.inputs[0]}"
        lines = [*_lines(f"if {part.only}:", part), *_indent(lines, 4), "else:", "    " + other]
    return lines


LOSSES = {
    "square": "(outs[0] - target).square().mean()",
    "cross entropy": "F.cross_entropy(outs[0], labels)",
    "sum": "outs[0].sum() * 0.01",
    "two heads": "outs[0].square().mean() + outs[-1].tanh().mean()",
    "huber": "F.smooth_l1_loss(outs[0], target)",
    "margin": "F.binary_cross_entropy_with_logits(outs[0], (target > 0).float())",
}

# The step inside the `with`, by the frame's name. `{loss}` is an expression of `outs` (what the model returned).
INSIDE = {
    "plain": "outs = m(x); loss = {loss}; m.late(); loss.backward()",
    "two forwards": """
        outs = m(x); loss = {loss}
        outs = m(x * 0.5 + 1); loss = loss + {loss}
        m.late(); loss.backward()""",
    "two rounds": """
        outs = m(x); loss = {loss}; loss.backward()
        outs = m(x.flip(0)); loss = {loss}; m.late(); loss.backward()""",
    "retain graph": "outs = m(x); loss = {loss}; loss.backward(retain_graph=True); m.late(); (loss * 0.5).backward()",
    "two losses": """
        outs = m(x); loss = {loss}; other = outs[-1].abs().mean()
        loss.backward(retain_graph=True); m.late(); other.backward()""",
    "penalty": """
        x.requires_grad_(); outs = m(x); loss = {loss}
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        m.late(); loss = loss + slope.square().sum(); loss.backward()""",
    "grad": """
        outs = m(x); loss = {loss}; m.late()
        ps = [p for p in m.parameters() if p.requires_grad]; gs = torch.autograd.grad(loss, ps, allow_unused=True)
        for p, g in zip(ps, gs): p.grad = g""",
    "some inputs": "outs = m(x); loss = {loss}; m.late(); loss.backward(inputs=list(m.parameters())[:2])",
    "validation": """
        outs = m(x); loss = {loss}
        with torch.no_grad(): m.eval(); seen = m(x)[0].mean(); m.train()
        m.late(); loss.backward(); m.log.append(seen)""",
    "validation first": """
        with torch.no_grad(): seen = m(x)[0].mean()
        outs = m(x); loss = {loss}; m.late(); loss.backward(); m.log.append(seen)""",
    "failing step": """
        outs = m(x); loss = {loss}; m.late()
        if t == 2: raise ArithmeticError
        loss.backward()""",
    "forward only": """
        outs = m(x); loss = {loss}; m.late()
        if t % 3 != 2: loss.backward()""",
    "other loss": "outs = m(x); loss = {loss} if t % 2 == 0 else outs[0].abs().sum() * 0.01; m.late(); loss.backward()",
    "integer argument": "outs = m(x, t); loss = {loss}; m.late(); loss.backward()",
    "closure": """
        def closure():
            opt.zero_grad(); outs = m(x); loss = {loss}; loss.backward(); return loss
        loss = closure(); opt.step(); loss = closure(); m.late()""",
    "functional": """
        outs = torch.func.functional_call(m, {n: p * 1.0 for n, p in m.named_parameters()}, (x,))
        loss = {loss}; m.late(); loss.backward()""",
    "kept graph": "outs = m(x); loss = {loss}; m.late(); loss.backward(); m.__dict__['kept'] = m(x * 0.5)[0]",
    "copied": """
        outs = m(x); loss = {loss}; m.late(); loss.backward()
        if t == 2:
            with torch.no_grad(): m.log.append(copy.deepcopy(m)(x)[0].mean())""",
    "teacher": """
        with torch.no_grad(): aim = m(x + 0.1)[0]
        outs = m(x); loss = {loss} + F.mse_loss(outs[0], aim); m.late(); loss.backward()""",
    "backward outside": "outs = m(x); loss = {loss}; m.late()",
    "crossing": """
        outs = m(x); loss = {loss}; m.late()
        if t % 2 == 0: m.__dict__['kept'] = loss
        else: (loss + m.__dict__.pop('kept')).backward()""",
}
OUTSIDE = {"backward outside": "loss.backward(); del outs"}


def _step(frame: Frame) -> list[str]:
    every = 2 if frame.name == "crossing" else frame.accumulate
    text = [
        "def step(m, opt, t, limited, data):",
        "    m.t = t",
        f"    x = data({list(frame.rows)}[t % {len(frame.rows)}], t)",
        "    target = x.roll(1, 1); labels = (x[:, 0] * 5).long().remainder(32)",
    ]
    if frame.input_needs_grad:
        text.append("    x.requires_grad_()")
    text.append("    given = x")
    zero = f"opt.zero_grad({'set_to_none=False' if frame.zeroes else ''})"
    text.append(f"    if t % {every} == 0: {zero}" if every > 1 else f"    {zero}")
    inside = _lines(INSIDE[frame.name].replace("{loss}", LOSSES[frame.loss]), Part(0, "", "", ""))
    if frame.prepares:
        inside.insert(0, "x = torch.tanh(x * 1.5) + 0.1")
    update = ["torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)"] if frame.clips else []
    update.append(f"if t % {every} == {every - 1}: opt.step()" if every > 1 else "opt.step()")
    own = frame.name in ("failing step", "closure")
    if frame.updates_inside and not own and frame.name not in OUTSIDE:
        inside, update = inside + update, []
    block = ["with limited():", *_indent(inside, 4)]
    if frame.name == "failing step":
        block = ["try:", *_indent(block, 4), "except ArithmeticError: loss = loss.detach()"]
    after = _lines(OUTSIDE.get(frame.name, ""), Part(0, "", "", "")) + ([] if frame.name == "closure" else update)
    return text + _indent([*block, *after, "m.between()", "return loss.detach(), given.grad"], 4)
