"""The parts that programs are made of, by feature. See program.py for `{o}`, `{h}`, `{k}`, `{n}`.

`[[a|b]]` is a choice that is drawn. Every part gives a float32 tensor of R x 32 from ones of that shape, of magnitude
about one for those of magnitude about one, so that neither values nor gradients vanish or overflow in a deep program.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    forward: str
    init: str = ""
    write: str = ""
    places: tuple[str, ...] = ("now", "end", "late", "between")
    only: tuple[str, ...] = ()  # conditions, of which one is drawn, for parts that would say nothing without


ROWS = "{h}.reshape(-1, 8, 32)"  # groups of eight rows
IMAGE = "{h}.reshape(-1, 8, 8, 8)"  # images of 8 x 8 with 8 channels
AGAIN = ".reshape(-1, 32)"


def _plain(**lines: str) -> dict[str, Template]:
    return {name: Template("{o} = " + line if "{o}" not in line else line) for name, line in lines.items()}


POINTWISE = _plain(
    tanh="torch.tanh({h})",
    sigmoid="torch.sigmoid({h}) * 2",
    gelu="F.gelu({h}, approximate='[[none|tanh]]')",
    silu="F.silu({h})",
    relu="F.relu({h})",
    leaky="F.leaky_relu({h}, 0.1)",
    softplus="F.softplus({h})",
    sin="torch.sin({h} * [[1.0|2.0]])",
    exp="torch.exp({h}.clamp(max=1.0))",
    sqrt="torch.sqrt({h}.abs() + 0.1)",
    log="torch.log1p({h}.abs())",
    power="{h}.clamp(-2, 2) ** [[2|3]] * 0.2",
    product="{h} * {k}",
    total="{h} + {k} * 0.5",
    addition="torch.add({h}, {k}, alpha=0.7)",
    where="torch.where({h} > 0, {h}, {k})",
    maximum="torch.[[maximum|minimum]]({h}, {k})",
    addcmul="torch.addcmul({h}, {k}, {h}.sigmoid(), value=0.3)",
    lerp="torch.lerp({h}, {k}, 0.3)",
    division="{h} / ({k}.abs() + 1)",
    softmax="torch.softmax({h}, [[0|1]]) * 8",
    log_softmax="F.log_softmax({h}, 1) + 3.5",
    glu="F.glu(torch.cat([{h}, {k}], 1), 1)",
    hypot="torch.hypot({h}, {k} + 0.1) * 0.5",
    erf="torch.erf({h})",
    prelu="F.prelu({h}, x.new_tensor([0.2]))",
    fft="torch.fft.irfft(torch.fft.rfft({h}, dim=1) * 0.8, n=32, dim=1)",
    complex="torch.view_as_real(torch.view_as_complex({h}.reshape(-1, 16, 2).contiguous()) ** 2).reshape(-1, 32) * 0.5",
    distance="torch.cdist({h}, {k}[:32]) * 0.2",
    normalized="F.normalize({h}, dim=1) * 4",
    similar="{h} * F.cosine_similarity({h}, {k}.flip(1), dim=1).unsqueeze(1)",
)

MATMUL = {
    "linear": Template("{o} = self.{n}({h})", "self.{n} = nn.Linear(32, 32, bias=[[True|False]])"),
    "wide": Template(
        "{o} = self.{n}b(F.gelu(self.{n}a({h})))", "self.{n}a, self.{n}b = nn.Linear(32, 64), nn.Linear(64, 32)"
    ),
    "weight": Template("{o} = {h} @ self.{n}[[|.t()]]", "self.{n} = nn.Parameter(torch.randn(32, 32) * 0.2)"),
    "addmm": Template("{o} = torch.addmm({k}, {h}, self.{n})", "self.{n} = nn.Parameter(torch.randn(32, 32) * 0.2)"),
    "attention": Template("{o} = self.{n}({h}) + {h}", "self.{n} = Attention(32)"),
    "scores": Template(f"""
        q = {ROWS}
        {{o}} = (torch.softmax(q @ q.transpose(1, 2) * 0.2, -1) @ q).reshape(-1, 32)"""),
    "bilinear": Template(
        "{o} = torch.einsum('ri,ij,rj->r', {h}, self.{n}, {k}).tanh().unsqueeze(1) * {h}",
        "self.{n} = nn.Parameter(torch.randn(32, 32) * 0.1)",
    ),
    "gram": Template("{o} = {h} @ ({k}.t() @ {k} / {k}.shape[0])"),
    "scale": Template("{o} = {h} * self.{n} + 0.1", "self.{n} = nn.Parameter(torch.rand(32) + 0.5)"),
    "heads": Template(
        "{o} = self.{n}(*[{h}.reshape(-1, 8, 32)] * 3, need_weights=[[True|False]])[0].reshape(-1, 32)",
        "self.{n} = nn.MultiheadAttention(32, 4, batch_first=True)",
    ),
}

NORMS = {
    "layer norm": Template("{o} = self.{n}({h})", "self.{n} = nn.LayerNorm(32)"),
    "batch norm": Template("{o} = self.{n}({h})", "self.{n} = nn.BatchNorm1d(32, momentum=[[0.1|0.5|None]])"),
    "batch norm 2d": Template(f"{{o}} = self.{{n}}({IMAGE}){AGAIN}", "self.{n} = nn.BatchNorm2d(8)"),
    "norm and relu": Template(f"{{o}} = F.relu(self.{{n}}({IMAGE})){AGAIN}", "self.{n} = nn.BatchNorm2d(8)"),
    "no statistics": Template("{o} = self.{n}({h})", "self.{n} = nn.BatchNorm1d(32, track_running_stats=False)"),
    "group norm": Template(f"{{o}} = self.{{n}}({IMAGE}){AGAIN}", "self.{n} = nn.GroupNorm(4, 8)"),
    "instance norm": Template(
        f"{{o}} = self.{{n}}({IMAGE}){AGAIN}", "self.{n} = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)"
    ),
    "rms norm": Template("{o} = self.{n}({h})", "self.{n} = nn.RMSNorm(32)"),
    "frozen statistics": Template(
        "{o} = self.{n}({h})", "self.{n} = nn.BatchNorm1d(32); self.{n}.train = lambda *_: 0"
    ),
    "shared norm": Template("{o} = self.{n}(self.{n}({h}) + {k})", "self.{n} = nn.BatchNorm1d(32)"),
}

CONVOLUTIONS = {
    "conv": Template(f"{{o}} = self.{{n}}({IMAGE}){AGAIN}", "self.{n} = nn.Conv2d(8, 8, 3, padding=1)"),
    "conv bn relu": Template(
        f"{{o}} = F.relu(self.{{n}}b(self.{{n}}a({IMAGE})), inplace=[[True|False]]){AGAIN}",
        "self.{n}a, self.{n}b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)",
    ),
    "depthwise": Template(f"{{o}} = self.{{n}}({IMAGE}){AGAIN}", "self.{n} = nn.Conv2d(8, 8, 3, padding=1, groups=8)"),
    "conv1d": Template(
        f"{{o}} = self.{{n}}({ROWS}.transpose(1, 2)).transpose(1, 2){AGAIN}",
        "self.{n} = nn.Conv1d(32, 32, 3, padding=1)",
    ),
    "transposed": Template(f"{{o}} = self.{{n}}({IMAGE}){AGAIN}", "self.{n} = nn.ConvTranspose2d(8, 8, 3, padding=1)"),
    "max pool": Template(f"{{o}} = F.interpolate(F.max_pool2d({IMAGE}, 2), scale_factor=2){AGAIN}"),
    "average pool": Template(
        f"{{o}} = F.interpolate(F.avg_pool2d({IMAGE}, 2), scale_factor=2, mode='bilinear', align_corners=False){AGAIN}"
    ),
    "channels last": Template(
        f"{{o}} = self.{{n}}({IMAGE}.contiguous(memory_format=torch.channels_last)){AGAIN}",
        "self.{n} = nn.Conv2d(8, 8, 1)",
    ),
    "unfold": Template(f"{{o}} = F.fold(F.unfold({IMAGE}, 2, stride=2) * 0.9, (8, 8), 2, stride=2){AGAIN}"),
    "padded": Template(
        f"{{o}} = self.{{n}}(F.pad({IMAGE}, (1, 1, 1, 1), mode='[[reflect|circular|constant]]')){AGAIN}",
        "self.{n} = nn.Conv2d(8, 8, 3)",
    ),
}

RANDOM = _plain(
    dropout="F.dropout({h}, 0.3)",
    dropout_inplace="{o} = {h} * 1.0; {o} = F.dropout({o}, 0.2, inplace=True)",
    dropout2d=f"F.dropout2d({IMAGE}, 0.2){AGAIN}",
    alpha="F.alpha_dropout({h}, 0.2, training=True)",
    noise="{h} + torch.randn_like({h}) * 0.1",
    scaled_noise="{h} * (1 + 0.2 * torch.rand({h}.shape))",
    mask="{h} * torch.bernoulli(torch.full_like({h}, 0.8))",
    drawn="{h} * torch.bernoulli(torch.sigmoid({h})).detach() + {h} * 0.1",
    permuted="{h}[torch.randperm({h}.shape[0])]",
    rrelu="F.rrelu({h}, training=True)",
    normal_="{h} + {h}.new_empty({h}.shape).normal_(0, 0.1)",
    gumbel="{h} * F.gumbel_softmax({h}, tau=1.0, hard=[[True|False]]) * 4",
    attention="F.scaled_dot_product_attention({h}.reshape(-1, 8, 32), {k}.reshape(-1, 8, 32), {h}.reshape(-1, 8, 32),"
    " dropout_p=0.1).reshape(-1, 32)",
) | {
    "generator": Template(
        "{o} = {h} + torch.randn({h}.shape, generator=self.{n}) * 0.1", "self.{n} = torch.Generator().manual_seed(5)"
    ),
    "module": Template("{o} = self.{n}({h})", "self.{n} = nn.Dropout(0.25)"),
    "seeded": Template(
        "with torch.random.fork_rng(): torch.manual_seed(self.t); {o} = {h} + torch.randn_like({h}) * 0.1"
    ),
}

VIEWS = _plain(
    transpose="{h}.reshape(-1, 8, 32).transpose(0, 1).reshape(-1, 32)",
    strided="{h}.t().contiguous().t()",
    halves="a, b = {h}.chunk(2, 1); {o} = torch.cat([b * 0.9, a], 1)",
    unbind="torch.stack([r * 0.9 for r in {h}.reshape(4, -1, 32).unbind(0)]).reshape(-1, 32)",
    slices="torch.cat([{h}[:, ::2], {h}[:, 1::2].tanh()], 1)",
    expand="{h} + {k}[:1].expand({h}.shape[0], 32) * 0.3",
    flip="{h}.flip(0)",
    roll="{h}.roll(3, 0)",
    narrow="F.pad({h}.narrow(1, 4, 24), (4, 4))",
    as_strided="{h}.contiguous().as_strided({h}.shape, (32, 1))",
    split="a, b = {h}.split([8, 24], 1); {o} = torch.cat([a.sin(), b], 1)",
    unsafe="a, b = torch.unsafe_chunk({h}, 2, 1); {o} = torch.cat([a.sigmoid(), b.tanh()], 1)",
    diagonal="{h} + torch.diag_embed({h}[:32].diagonal()).sum(0)",
    movedim="{h}.reshape(2, -1, 32).movedim(0, 2).movedim(2, 0).reshape(-1, 32)",
    repeat="{h}[: {h}.shape[0] // 2].repeat(2, 1)",
    windows="F.pad({h}.unfold(1, 4, 4).mean(2), (0, 24)) + {h}",
    view_dtype="{h} * (({h}.detach().view(torch.int32) >> 31).float() + 1.5)",
)

INPLACE = _plain(
    scaled="{o} = {h} * 1.5; {o}.mul_(0.6)",
    activation="{o} = {h} + 0.1; {o}.[[tanh_|relu_|sigmoid_|sin_]]()",
    added="{o} = {h} * 0.5; {o}.add_({k}, alpha=0.5)",
    operator="{o} = {h} * 0.5; {o} += {k}.sigmoid()",
    view="{o} = {h} * 1.0; {o}[:, :8].mul_(0.5)",
    written="{o} = {h} * 1.0; {o}[:, :8] = {k}[:, 8:16].tanh()",
    masked="{o} = {h} + 0.0; {o}.masked_fill_({k} > 1, 0.5)",
    clamped="{o} = {h} + 0.0; {o}.clamp_(-1.5, 1.5)",
    copied="{o} = torch.empty_like({h}); {o}.copy_({h}); {o}[::2].copy_({k}[::2])",
    filled="{o} = {h}.new_zeros({h}.shape); {o}[:, :16] = {h}[:, :16]; {o}[:, 16:] = {k}[:, :16]",
    chain="{o} = {h} * 0.9; {o}.add_(0.1); {o}.relu_(); {o}.mul_(1.1)",
    chunk="{o} = {h} * 1.0; a, b = {o}.view(-1, 2, 16).select(1, 0), {o}.view(-1, 2, 16).select(1, 1); a.mul_(0.7)",
    transposed="{o} = {h} * 1.0; {o}.t().mul_({k}.t().sigmoid())",
    foreach="{o} = {h} * 1.0; torch._foreach_mul_([{o}], 0.8)",
    foreach_list="{o} = {h} * 1.0; torch._foreach_add_([{o}], [{k}.detach()], alpha=0.2)",
    addmm="{o} = {h} * 0.5; {o}.addmm_({k}, {k}[:32] * 0.1)",
    out_of_order="{o} = {h} * 1.0; a = {o}.view(-1, 8, 32); {o}.mul_({k}.sigmoid()); {o} = a.tanh().reshape(-1, 32)",
    index_add="{o} = {h} * 1.0; {o}.index_add_(0, torch.arange(8) * 2, {k}[:8] * 0.5)",
    scatter="{o} = {h} * 1.0; {o}.scatter_add_(1, {k}.detach().argsort(1)[:, :4], {k}[:, :4])",
    index_put="{o} = {h} * 1.0; {o}.index_put_((torch.arange(8),), {k}[:8] * 0.5, accumulate=[[True|False]])",
    twice="{o} = {h}.exp() * 0.2; {o} = {o} * 1.0; {o}[:16].add_(1); {o}[16:].mul_({k}[16:].detach())",
    relu="{o} = self.stem({h}); {o} = F.relu({o}, inplace=True)",
)

CASTS = _plain(
    bfloat="{h}.to(torch.bfloat16).tanh().float()",
    half="({h}.half() * 0.5).float()",
    double="torch.sin({h}.double()).float()",
    matmul="({h}.bfloat16() @ {k}[:32].bfloat16() * 0.1).float()",
    two="a, b = {h}.to(torch.bfloat16), {h}.to(torch.bfloat16); {o} = (a * a).float() * 0.5 + (b.sin()).float()",
    type_as="{h}.to({k}.dtype, copy=True) * 0.9",
    integers="{h} + ({h}.detach() * 3).int().float() * 0.1",
)

INDEXING = _plain(
    gather="{h}.gather(1, {k}.detach().argsort(1))",
    select="{h}.index_select(0, torch.arange({h}.shape[0]).flip(0))",
    advanced="{h}[torch.arange({h}.shape[0]).roll(5)]",
    pairs="{h} + {k}[torch.arange({h}.shape[0]) % 16, :] * 0.3",
    masked="{o} = {h} * 0.5; m_ = {h} > 0; {o} = {o}.masked_scatter(m_, {h}.masked_select(m_).tanh())",
    along="torch.take_along_dim({h}, {h}.argsort(1, descending=True), 1)",
    scatter="torch.zeros_like({h}).scatter_add(1, {h}.detach().argsort(1), {h})",
    index_add="torch.zeros_like({h}).index_add(0, torch.arange({h}.shape[0]) // 2, {h})",
    nonzero="{o} = {h} * 0.7; i_ = ({h}[:, 0] > 0).nonzero()[:, 0]; {o} = {o}.index_add(0, i_, {k}[i_] * 0.3)",
    one_hot="{h} * (F.one_hot({h}.argmax(1), 32).float() + 0.5)",
    tril="{h} + torch.tril({h}.reshape(-1, 32, 32)[:1].sum(0)).sum(0) * 0.05",
    take="{h} + {h}.take(torch.arange(32) * 3) * 0.2",
) | {
    "embedding": Template(
        "{o} = {h} + self.{n}((x[:, 0].detach() * 3).long().remainder(40))", "self.{n} = nn.Embedding(40, 32)"
    ),
    "chosen": Template("{o} = {h} * self.{n}({h}.argmax(1))", "self.{n} = nn.Embedding(32, 32)"),
    "bag": Template(
        "{o} = {h} + self.{n}((x[:, :4] * 3).long().remainder(40))", "self.{n} = nn.EmbeddingBag(40, 32, mode='sum')"
    ),
}

SORTING = _plain(
    sort="{h}.sort(1)[0]",
    topk="{h}.topk(32, 1)[0]",
    kth="{h} - {h}.kthvalue(16, 1, keepdim=True)[0]",
    median="{h} - {h}.median(1, keepdim=True)[0]",
    cummax="{h}.cummax(1)[0] * 0.7",
    mode="{h} - {h}.mode(1, keepdim=True)[0] * 0.5",
)

EARLY_DYING = _plain(
    argsort="{h}.gather(1, ({h} * 1.0).argsort(1)) + {h}",
    indices="{o} = {h}.gather(1, {k}.topk(32, 1)[1]) * 0.9",
    logged_norm="self.log.append({h}.norm().detach()); {o} = {h}.tanh()",
    item="{o} = {h} * (1.0 + 0.01 * float({h}.square().mean()))",
    unused="torch.exp({h}).sum(); {o} = {h}.sigmoid() * 2",
    overwritten="{o} = torch.tanh({h}); {o} = {h} * {o}; {o} = {o} + 0.1",
    maximal="{h} + {h}.max(1)[1].unsqueeze(1) * 0.01",
)

WHOLE_REDUCTIONS = _plain(  # whose formulas ask whether a dispatch mode is active
    max="{h} * 0.5 + {h}.max()",
    min="{h} * 0.5 - {h}.min()",
    median="{h} - {h}.median()",
    nanmedian="{h} - {h}.nanmedian()",
    prod="{h} * ({h}[:2] * 0.2 + 1).prod()",
    prod_dim="{h} * ({h} * 0.1 + 1).prod(1, keepdim=True)",
    cumprod="({h} * 0.1 + 1).cumprod(1) * {h}",
)

REDUCTIONS = _plain(
    mean="{h} - {h}.mean([[0|1]], keepdim=True)",
    std="{h} / ({h}.std(0, keepdim=True) + 0.5)",
    var="{h} / ({h}.var() + 1)",
    amax="{h} - {h}.amax(1, keepdim=True) * 0.5",
    max_dim="{h} - {h}.max(1, keepdim=True)[0] * 0.5",
    norm="{h} / ({h}.norm() * 0.02 + 1)",
    cumsum="{h}.cumsum(1) * 0.2",
    logsumexp="{h} - {h}.logsumexp(1, keepdim=True) * 0.3",
    aminmax="a, b = {h}.aminmax(dim=1, keepdim=True); {o} = ({h} - a) / (b - a + 1)",
    logcumsumexp="{h}.logcumsumexp(1) * 0.5",
)

DETACHED = _plain(
    detached="{h} * {k}.detach().sigmoid()",
    straight="{h} + (torch.round({h}) - {h}).detach()",
    no_grad="with torch.no_grad(): s_ = {h}.square().mean(1, keepdim=True)\n{o} = {h} / (s_ + 1)",
    target="{h} - 0.3 * ({h} @ {h}.t().detach() * 0.02) @ {k}.detach()",
    item_branch="{o} = {h} * 0.9 if float({h}.detach().mean()) > 0 else {h} * 1.1",
    inference="with torch.inference_mode(): s_ = float({h}.detach().mean())\n{o} = {h} - s_",
)

SCALARS = _plain(
    factor="{h} * (0.5 + 0.1 * self.t)",
    exponent="{h}.abs().add(0.1) ** (1 + 0.1 * self.t)",
    added="torch.add({h}, {k}, alpha=0.1 * self.t)",
    slope="F.leaky_relu({h}, 0.05 * self.t)",
    tensor="{h} * torch.tensor(1.0 + 0.1 * self.t)",
    rolled="{h}.roll(self.t, 1)",
    offset="F.pad({h}[:, self.t : self.t + 24], (0, 8)) + {h} * 0.1",
    probability="F.dropout({h}, 0.1 + 0.05 * self.t)",
    clamp="{h}.clamp(max=1.0 + 0.2 * self.t)",
    filled="{h} * torch.full((32,), 0.5 + 0.1 * self.t)",
    beta="F.softplus({h}, beta=1 + self.t)",
    momentum="F.batch_norm({h}, None, None, training=True, eps=1e-3 * (self.t + 1))",
)

CUSTOM = _plain(
    square="Square.apply({h}) * 0.5",
    output="Tanh.apply({h})",
    between="{o}, m_ = SavesBetween.apply({h}); self.log.append(m_.sum())",
    dirty="{o} = Dirty.apply({h} * 1.0)",
    dirty_view="{o} = {h} * 1.0; Dirty.apply({o}[:, :16])",
    context="OnContext.apply({h})",
    numpy="InNumpy.apply({h})",
    writes="WritesSaved.apply({h})",
    op="torch.ops.outcore_fuzz.bent({h})",
) | {
    "reruns": Template("{o} = Reruns.apply({h}, self.{n})", "self.{n} = nn.Parameter(torch.randn(32, 32) * 0.2)"),
    "mutating op": Template(
        "torch.ops.outcore_fuzz.count_(self.{n}, {h}.detach()); {o} = {h} + self.{n}.detach().clone()",
        "self.register_buffer('{n}', torch.zeros(32))",
    ),
}

RETURNED = {  # what a function saved is its gradient
    "to parameter": Template(
        "g_ = torch.tanh({h} * 2); {o} = torch.sin(g_) * {h} + ReturnsSaved.apply(self.{n}, g_[:48]) * 0.01",
        "self.{n} = nn.Parameter(torch.randn(48, 32))",
    ),
    "scaled by a hook": Template(
        "g_ = torch.tanh({h}[:48] * 2); {o} = {h} + torch.sin(g_).mean(0) + ReturnsSaved.apply(self.{n}, g_) * 0.01",
        "self.{n} = nn.Parameter(torch.randn(48, 32))\n"
        "self.{n}.register_post_accumulate_grad_hook("
        "lambda p: (p.grad.mul_(2.0 if self.t >= [[0|3]] else 1.0), None)[1])",
    ),
    "to activation": Template("g_ = torch.sigmoid({k}); {o} = PassesSaved.apply({h}, g_) + g_.sin()"),
}

RECURRENT = {
    "lstm cell": Template("s_ = self.{n}({h}); {o} = self.{n}({k}, s_)[0] * 2", "self.{n} = nn.LSTMCell(32, 32)"),
    "gru cell": Template("{o} = self.{n}({h}, self.{n}({k}, {h}.tanh()))", "self.{n} = nn.GRUCell(32, 32)"),
    "lstm": Template("{o} = self.{n}({h}.reshape(4, -1, 32))[0].reshape(-1, 32) * 2", "self.{n} = nn.LSTM(32, 32)"),
    "gru": Template("{o} = self.{n}({h}.reshape(4, -1, 32))[0].reshape(-1, 32)", "self.{n} = nn.GRU(32, 32)"),
    "rnn": Template(
        "s_ = {h}[:16] * 0\n"
        "for r_ in {h}.reshape(-1, 16, 32): s_ = torch.tanh(r_ + s_ @ self.{n})\n"
        "{o} = {h} + s_.repeat({h}.shape[0] // 16, 1)",
        "self.{n} = nn.Parameter(torch.randn(32, 32) * 0.2)",
    ),
}

TIED = {
    "twice": Template("{o} = self.{n}(F.relu(self.{n}({h})))", "self.{n} = nn.Linear(32, 32)"),
    "stem": Template("{o} = F.linear({h}, self.stem.weight[[|.t()]])"),
    "shared": Template(
        "{o} = self.{n}a({h}) + self.{n}b({k})",
        "self.{n}a, self.{n}b = nn.Linear(32, 32), nn.Linear(32, 32); self.{n}b.weight = self.{n}a.weight",
    ),
    "embedding": Template(
        "{o} = F.linear(self.{n}({h}.argmax(1)) + {h}, self.{n}.weight) * 0.3", "self.{n} = nn.Embedding(32, 32)"
    ),
    "frozen": Template("{o} = self.{n}({h}).tanh()", "self.{n} = nn.Linear(32, 32).requires_grad_(False)"),
    "weight norm": Template(
        "{o} = self.{n}({h})", "self.{n} = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))"
    ),
    "spectral norm": Template(
        "{o} = self.{n}({h})", "self.{n} = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))"
    ),
}

LINALG = _plain(
    solve="torch.linalg.solve({h}.t() @ {h} / {h}.shape[0] + 2 * torch.eye(32), {k}.t()).t()",
    inverse="{h} @ torch.linalg.inv({k}.t() @ {k} / {k}.shape[0] + 2 * torch.eye(32)) * 2",
    cholesky="{h} @ torch.linalg.cholesky({k}.t() @ {k} / {k}.shape[0] + torch.eye(32)) * 0.5",
    exponential="{h} @ torch.matrix_exp({k}[:32] * 0.05)",
    triangular="torch.linalg.solve_triangular(torch.eye(32) * 2 + {k}[:32].tril(-1) * 0.1, {h}.t(), upper=False).t()",
)

FUNCTORCH = _plain(
    vmap="torch.vmap(lambda r: torch.tanh(r) * r.sum())({h}) * 0.2",
    slope="{h} + torch.func.grad(lambda z: torch.sin(z).square().sum())({h}) * 0.5",
    jvp="torch.func.jvp(torch.tanh, ({h},), ({k},))[1] + {h}",
)

STRANGE = _plain(
    sparse="torch.sparse.mm(torch.eye({h}.shape[0]).to_sparse(), {h}) * 0.9",
    subclass="{h}.as_subclass(Labeled).tanh().as_subclass(torch.Tensor)",
    nested="torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([{h}[:16], {h}[16:]]) * 0.5, 0.0)"
    ".reshape(-1, 32)[: {h}.shape[0]] + {h}",
    retained="{o} = {h} * 1.0; {o}.retain_grad() if {o}.requires_grad else None; {o} = {o} + 0.0",
    out_argument="with torch.no_grad(): e_ = torch.empty({h}.shape); torch.mul({h}, 0.5, out=e_)\n"
    "{o} = {h} * e_.sigmoid()",
    listed="{h} + sum(torch.meshgrid({h}[0], {k}[0], indexing='ij')).mean(0) * 0.1",
)

CARRIED = {
    "state": Template(
        "s_ = self.{n}; {o} = {h} + (s_.mean(0) if s_ is not None else 0.0); self.{n} = {o}.detach()", "self.{n} = None"
    ),
    "queue": Template(
        "{o} = {h} * torch.sigmoid({h} @ self.{n}.clone().detach())[:, :1]\n"
        "self.{n} = {h}.detach()[:32].t().contiguous()",
        "self.{n} = torch.randn(32, 32)",
    ),
    "logged": Template("{o} = torch.sin({h}); self.log.append({o}.detach().mean())"),
    "memory": Template("{o} = {h}.tanh(); self.{n} = {o}.detach()", "self.{n} = None"),
}

HOOKS = {
    "gradient": Template("{o} = {h}.tanh()\nif {o}.requires_grad: {o}.register_hook(lambda g: g * 1.5)"),
    "looks": Template(
        "{o} = {h}.sin()\n"
        "if {o}.requires_grad: {o}.register_hook(lambda g: (self.log.append(g.mean().detach()), None)[1])"
    ),
    "in place": Template(
        "{o} = {h} * 0.9\n"
        "if {o}.requires_grad: {o}.register_hook(lambda g: (g.mul_(0.5 if self.t >= [[0|3]] else 1.0), None)[1])"
    ),
    "parameter": Template(
        "{o} = self.{n}({h})", "self.{n} = nn.Linear(32, 32); self.{n}.weight.register_hook(lambda g: g * 0.7)"
    ),
    "accumulated": Template(
        "{o} = self.{n}({h})",
        "self.{n} = nn.Linear(32, 32)\n"
        "self.{n}.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])",
    ),
    "updates at once": Template(
        "{o} = {h} + self.{n} * 1.0",
        "self.{n} = nn.Parameter(torch.randn(32))\n"
        "self.{n}.register_post_accumulate_grad_hook(lambda p: (p.data.add_(p.grad, alpha=-0.1), None)[1])",
    ),
    "forward": Template(
        "{o} = self.{n}({h})", "self.{n} = nn.Linear(32, 32); self.{n}.register_forward_hook(lambda m, i, o: o * 0.8)"
    ),
    "forward pre": Template(
        "{o} = self.{n}({h})",
        "self.{n} = nn.Linear(32, 32); self.{n}.register_forward_pre_hook(lambda m, i: (i[0].tanh(),))",
    ),
    "kept outputs": Template(
        "{o} = self.{n}({h}).tanh()",
        "self.{n} = nn.Linear(32, 32)\n"
        "self.{n}.register_forward_hook(lambda m, i, o: self.__dict__.__setitem__('{n}seen', o.detach()))",
    ),
    "backward": Template(
        "{o} = self.{n}({h})",
        "self.{n} = nn.Linear(32, 32)\n"
        "self.{n}.register_full_backward_hook(lambda m, i, o: (i[0] * 0.9,) if i[0] is not None else None)",
    ),
    "backward pre": Template(
        "{o} = self.{n}({h})",
        "self.{n} = nn.Linear(32, 32); self.{n}.register_full_backward_pre_hook(lambda m, o: (o[0] * 1.1,))",
    ),
    "node": Template(
        "{o} = {h}.tanh()\n"
        "if {o}.requires_grad: {o}.grad_fn.register_hook(lambda i, o: tuple(g if g is None else g * 0.9 for g in i))"
    ),
    "node pre": Template(
        "{o} = {h}.tanh()\nif {o}.requires_grad: {o}.grad_fn.register_prehook(lambda o: tuple(g * 0.9 for g in o))"
    ),
    "writes in backward": Template(
        "{o} = {h}.tanh() * self.{n}.clone()\n"
        "if {o}.requires_grad: {o}.register_hook(lambda g: (self.{n}.mul_(0.9), None)[1])",
        "self.register_buffer('{n}', torch.rand(32))",
    ),
}

# -- buffers: how they are read, and the doors through which they change ----------------------------------------------

READS = {  # whether autograd saves the buffer itself: then a door that counts versions fails in plain PyTorch, too
    "{o} = torch.tanh({h} @ self.{n})": True,
    "{o} = torch.cdist({h}, self.{n}) * 0.2": True,
    "{o} = {h} * self.{n}[:1]": True,
    "{o} = {h} * self.{n}.mean(0)": False,
    "{o} = torch.tanh({h} @ self.{n}.clone())": False,
    "{o} = torch.tanh({h} @ torch.tanh(self.{n}))": False,
    "{o} = {h} * (self.{n} * 0.5).sum(0).detach()": False,
    "{o} = {h} * F.embedding({h}.argmax(1), self.{n})": False,
    "{o} = {h} + torch.sigmoid({h}) * self.{n}.repeat({h}.shape[0] // 32 + 1, 1)[: {h}.shape[0]].sin()": False,
    "{o} = torch.tanh({h} @ self.{n}.to(torch.bfloat16).float())": False,
}

SILENT_DOORS = {  # no version tells
    "data": "self.{n}.data.mul_(0.9).add_({d}, alpha=0.1)",
    "data copy": "self.{n}.data.copy_({d})",
    "data slice": "self.{n}.data[:4] = {d}[:4]",
    "data assigned": "self.{n}.data = self.{n}.data * 0.9",
    "numpy": "self.{n}.numpy()[:] *= 0.9",
    "shared numpy": "self.{n}_array *= 0.9",
    "dlpack": "torch.from_dlpack(self.{n}.detach()).mul_(0.9)",
    "storage": "self.{n}.untyped_storage().copy_((self.{n} * 0.9).untyped_storage())",
    "set of data": "self.{n}.data.set_((self.{n}.data * 0.9))",
    "foreach data": "torch._foreach_mul_([self.{n}.data], 0.9)",
    "memory view": "memoryview(self.{n}.numpy()).cast('B').cast('f')[0] = 0.25",
}

COUNTED_DOORS = {
    "no_grad": "with torch.no_grad(): self.{n}.mul_(0.9)",
    "detach": "self.{n}.detach().mul_(0.9)",
    "copy": "with torch.no_grad(): self.{n}.copy_({d})",
    "slice": "with torch.no_grad(): self.{n}[:4] = {d}[:4]",
    "out": "torch.mul(self.{n}, 0.9, out=self.{n})",
    "set_": "with torch.no_grad(): self.{n}.set_(self.{n} * 0.9)",
    "lerp": "self.{n}.lerp_({d}, 0.1)",
    "foreach": "torch._foreach_mul_([self.{n}], 0.9)",
    "index_add": "self.{n}.index_add_(0, torch.arange(4), {d}[:4], alpha=0.1)",
    "swap_tensors": "torch.utils.swap_tensors(self.{n}, self.{n} * 0.9)",
    "reassigned": "self.{n} = self.{n} * 0.9",
    "init": "nn.init.normal_(self.{n})",
    "resized": "self.{n}.resize_(16, 32).resize_(32, 32).fill_(0.1)",
}

INFERENCE_DOOR = "with torch.inference_mode(): self.{n}.mul_(0.9)"
STATISTICS = {
    "applied, then updated": Template(
        "{o} = F.batch_norm({h}, self.{n}.running_mean, self.{n}.running_var, self.{n}.weight, self.{n}.bias)",
        "self.{n} = nn.BatchNorm1d(32)",
        "with torch.no_grad(): self.{n}(torch.ones(16, 32) * self.t + torch.arange(32))",
    ),
    "own eval": Template(
        "self.{n}.eval(); {o} = self.{n}({h}); self.{n}.train()",
        "self.{n} = nn.BatchNorm1d(32)",
        "with torch.no_grad(): self.{n}(torch.ones(16, 32) * self.t + torch.arange(32))",
    ),
}

ACTIVATION_DOORS = {  # an activation that was saved changes: plain PyTorch's backward sees that
    "data": "{o}.data.mul_(0.5)",
    "data assigned": "{o}.data = {o}.data.clamp(-0.5, 0.5)",
    "numpy": "{o}.detach().numpy()[:] *= 0.5",
    "input": "{h}.data.mul_(0.9)",
    "dlpack": "torch.from_dlpack({o}.detach()).mul_(0.5)",
}

BLOCKS = {
    "checkpoint": "{o} = checkpoint({f}, {h}, use_reentrant=False)",
    "reentrant checkpoint": "{o} = checkpoint({f}, {h}, use_reentrant=True)",
    "autocast": "with torch.autocast('cpu', torch.bfloat16): {o} = {f}({h})\n{o} = {o}.float()",
    "loop": "{o} = {f}({f}({h}))",
    "no grad": "with torch.no_grad(): {o} = {f}({h})\n{o} = {h} + {o} * 0.3",
    "saved hooks": "with torch.autograd.graph.saved_tensors_hooks(lambda s: s * 1.0, lambda s: s): {o} = {f}({h})",
    "save on cpu": "with torch.autograd.graph.save_on_cpu(): {o} = {f}({h})",
    "unused": "self.log.append({f}({h}).detach().mean()); {o} = {h} * 1.0",
}

FEATURES = {
    "pointwise ops": POINTWISE,
    "matrix products": MATMUL,
    "norms": NORMS,
    "convolutions": CONVOLUTIONS,
    "random numbers": RANDOM,
    "views": VIEWS,
    "in-place ops": INPLACE,
    "casts": CASTS,
    "indexing": INDEXING,
    "sorting": SORTING,
    "nodes that die early": EARLY_DYING,
    "reductions": REDUCTIONS,
    "reductions of everything": WHOLE_REDUCTIONS,
    "detached branches": DETACHED,
    "changing scalars": SCALARS,
    "custom functions": CUSTOM,
    "saved tensors as gradients": RETURNED,
    "recurrent cells": RECURRENT,
    "tied weights": TIED,
    "linear algebra": LINALG,
    "torch.func": FUNCTORCH,
    "unusual tensors": STRANGE,
    "state carried on": CARRIED,
    "hooks": HOOKS,
    "statistics of norms": STATISTICS,
}
