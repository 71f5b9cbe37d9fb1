"""Inductor's text, read: which buffers each launch reads, makes and overwrites."""

from __future__ import annotations

import gzip
import re
import textwrap
from pathlib import Path

import pytest

from outcore.compiled.inductor import read
from outcore.compiled.kernel_text import kernels_of
from outcore.compiled.program import Program, UnknownStatement

TRITON = """
triton_{name} = async_compile.triton('triton_{name}', '''
@triton_heuristics.pointwise(
    triton_meta={{'signature': {{{signature}}}}},
    inductor_meta={{'mutated_arg_names': [{mutated}]}},
)
@triton.jit
def triton_{name}({arguments}, xnumel, XBLOCK : tl.constexpr):
    {body}
''', device_str='cuda')
"""


def triton(name: str, arguments: list[str], body: str, mutated: tuple[str, ...] = ()) -> str:
    return TRITON.format(
        name=name,
        signature=", ".join(f"'{argument}': '*fp32'" for argument in arguments),
        mutated=", ".join(repr(argument) for argument in mutated),
        arguments=", ".join(arguments),
        body=body.replace("\n", "\n    "),
    )


ADD = triton(
    "add",
    ["in_ptr0", "in_ptr1", "out_ptr0"],
    "tmp0 = tl.load(in_ptr0 + (x0), xmask)\n"
    "tmp1 = tl.load(in_ptr1 + (x0), xmask)\n"
    "tl.store(out_ptr0 + (x0), tmp0 + tmp1, xmask)",
)
RELU_ = triton(
    "relu_",
    ["in_out_ptr0"],
    "tmp0 = tl.load(in_out_ptr0 + (x0), xmask)\ntl.store(in_out_ptr0 + (x0), tmp0, xmask)",
    ("in_out_ptr0",),
)
MEAN = triton(  # its pointer is the place of a first result and of a second, and never of what lay there before
    "mean",
    ["in_out_ptr0", "in_ptr0"],
    "tmp0 = tl.load(in_ptr0 + (x0), xmask)\n"
    "tl.store(in_out_ptr0 + (x0), tmp0, xmask)\n"
    "tmp1 = tl.load(in_out_ptr0 + (x0))\n"
    "tl.store(in_out_ptr0 + (x0), tmp1)",
    ("in_out_ptr0",),
)
SCATTER = triton(
    "scatter",
    ["in_ptr0", "out_ptr0"],
    "tmp0 = tl.load(in_ptr0 + (x0), xmask)\ntl.atomic_add(out_ptr0 + (x0), tmp0, xmask)",
    ("out_ptr0",),
)
CPP = """
cpp_statistics = async_compile.cpp_pybinding(['float*', 'const float*', 'float*', 'const int64_t'], r'''
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       float* out_ptr1,
                       const int64_t ks0)
{
    auto out_ptr0 = in_out_ptr0;
    {
        out_ptr0[static_cast<int64_t>(x0)] = tmp0;
        auto tmp1 = out_ptr1[static_cast<int64_t>(x0)];
        auto tmp2 = in_out_ptr0[static_cast<int64_t>(x0)];
        out_ptr1[static_cast<int64_t>(x0)] = tmp1;
    }
}
''')
"""


ATTENTION = """
triton_tem_fused_0 = async_compile.triton('triton_tem_fused_0', '''
@triton_heuristics.template(
    num_stages=3,
    triton_meta={'signature': {'arg_Q': '*fp32', 'arg_K': '*fp32', 'arg_LSE': '*fp32', 'arg_IDX': '*i32',
                               'out_ptr0': '*fp32'}},
    inductor_meta={'kernel_name': 'triton_tem_fused_0', 'grid_type': 'FixedGrid', 'extra_launcher_args': ['_grid_0']},
)
@triton.jit
def triton_tem_fused_0(arg_Q, arg_K, arg_LSE, arg_IDX, out_ptr0):
    BLOCK_M : tl.constexpr = 64
    Q = arg_Q
    K = arg_K
    LSE = arg_LSE
    KV_IDX = arg_IDX
    kv_indices = KV_IDX + tl.program_id(0)
    kv_start = tl.load(kv_indices) * BLOCK_M
    q = tl.load(Q + tl.arange(0, BLOCK_M))
    acc, m_i = forward_inner(Q, K, q, kv_start)
    xindex = kv_start + tl.arange(0, BLOCK_M)
    tl.store(out_ptr0 + (xindex), acc)
    l_ptrs = LSE + xindex
    if True:
        tl.store(l_ptrs, m_i)

@triton.jit
def forward_inner(Q, K, q, kv_start):
    k = tl.load(K + kv_start)
    return tl.dot(q, k), q
''', device_str='cuda')
"""


def program(kernels: str, body: str, num_inputs: int = 2) -> Program:
    names = ", ".join(f"primals_{number}" for number in range(1, num_inputs + 1))
    head = f"{names}, = args\nargs.clear()\n"
    return read(kernels + "\ndef call(args):\n" + textwrap.indent(head + body, "    "), [True] * num_inputs)


def named(found: Program, numbers: list[int]) -> list[str]:
    return [found.buffers[number].name for number in numbers]


def test_what_kernels_do_with_their_pointers() -> None:
    found = kernels_of(ADD + RELU_ + MEAN + SCATTER + CPP)
    assert found["triton_add"].roles == ("r", "r", "w", "")
    assert found["triton_relu_"].roles == ("rw", "")
    assert found["triton_mean"].roles == ("w", "r", "")
    assert found["triton_scatter"].roles == ("r", "rw", "")
    assert found["cpp_statistics"].roles == ("w", "r", "rw", "")
    assert {name for name, kernel in found.items() if not kernel.is_pure} == {"triton_scatter"}


def test_what_templates_write_is_where_their_stores_lead() -> None:
    """Their text lists nothing: a matrix product, or the kernels of flex attention."""
    found = kernels_of(ATTENTION)["triton_tem_fused_0"]
    assert found.roles == ("r", "r", "rw", "r", "rw")
    assert found.is_pure
    (launch,) = program(
        ATTENTION,
        """
buf0 = empty_strided_cuda((64, ), (1, ), torch.float32)
buf1 = empty_strided_cuda((64, ), (1, ), torch.float32)
stream0 = get_raw_stream(0)
triton_tem_fused_0.run(primals_1, primals_2, buf0, primals_3, buf1, 4, stream=stream0)
return (buf1, buf0)
""",
        num_inputs=3,
    ).launches
    assert launch.is_product
    assert len(launch.reads) == 3
    assert len(launch.fresh) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "    tl.store(Q, q)\n    return tl.dot(q, k), q",  # in a function beside the main one
        "    desc.store([0], q)\n    return q, q",
    ],
)
def test_templates_that_store_elsewhere_are_not_known(statement: str) -> None:
    changed = ATTENTION.replace("    return tl.dot(q, k), q", statement)
    assert changed != ATTENTION
    assert kernels_of(changed) == {}
    assert kernels_of(ATTENTION.replace("tl.store(l_ptrs, m_i)", "desc.store([0], m_i)")) == {}


def test_allocations_launches_and_results() -> None:
    found = program(
        ADD + RELU_,
        """
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
    stream0 = get_raw_stream(0)
    triton_add.run(primals_1, primals_2, buf0, 32, stream=stream0)
    del primals_2
    buf1 = buf0; del buf0  # reuse
    triton_relu_.run(buf1, 32, stream=stream0)
    buf2 = extern_kernels.convolution(buf1, primals_1, stride=(1, 1), bias=None)
    assert_size_stride(buf2, (4, 8), (8, 1), 'torch.ops.aten.convolution.default')
    buf3 = torch.ops.aten.max_pool2d_with_indices.default(buf2, [2, 2])
    buf4 = buf3[0]
    buf5 = buf3[1]
    del buf3
return (reinterpret_tensor(buf4, (32, ), (1, ), 0), buf5, None, 7)
""",
    )
    add, relu, convolution, pool = found.launches
    assert (named(found, add.reads), named(found, add.fresh)) == (["primals_1", "primals_2"], ["buf0"])
    assert named(found, relu.reads) == named(found, relu.overwrites) == ["buf0"]
    assert named(found, convolution.reads) == ["buf0", "primals_1"]
    assert convolution.is_product
    assert named(found, list(pool.results.values())) == ["buf4", "buf5"]
    assert found.buffers[add.fresh[0]].num_bytes == 128
    assert found.guard == "torch.cuda._DeviceGuard(0)"
    assert len(found.outputs) == 4


def test_a_buffer_that_is_only_written_gets_memory_of_its_own() -> None:
    found = program(
        ADD + MEAN,
        """
buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
triton_add.run(primals_1, primals_2, buf0, 32, stream=stream0)
buf1 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
triton_add.run(buf0, primals_1, buf1, 32, stream=stream0)
buf2 = reinterpret_tensor(buf0, (8, 4), (4, 1), 0); del buf0  # reuse
triton_add.run(buf1, buf1, buf2, 32, stream=stream0)
buf3 = primals_1; del primals_1  # reuse
buf4 = buf3; del buf3  # reuse
triton_mean.run(buf4, buf2, 32, stream=stream0)
return (buf4, )
""",
    )
    assert [named(found, launch.fresh) for launch in found.launches] == [["buf0"], ["buf1"], ["buf2"], ["buf4"]]
    assert not any(launch.overwrites or launch.changes for launch in found.launches)
    assert found.buffers[found.launches[3].fresh[0]].like == found.input_buffers["primals_1"]


def test_inputs_that_are_written_into() -> None:
    found = program(
        CPP,
        """
buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
cpp_statistics(buf0, primals_1, primals_2, 8)
return (buf0, )
""",
    )
    (launch,) = found.launches
    assert named(found, launch.changes) == ["primals_2"]
    assert named(found, launch.reads) == ["primals_1"]


def test_a_buffer_that_several_launches_fill_is_overwritten_by_the_later_ones() -> None:
    found = program(
        ADD,
        """
buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
triton_add.run(primals_1, primals_2, reinterpret_tensor(buf0, (4, 8), (8, 1), 0), 32, stream=stream0)
triton_add.run(primals_1, primals_2, reinterpret_tensor(buf0, (4, 8), (8, 1), 32), 32, stream=stream0)
return (buf0, )
""",
    )
    first, second = found.launches
    assert (named(found, first.fresh), named(found, second.overwrites)) == (["buf0"], ["buf0"])
    assert named(found, second.reads) == ["primals_1", "primals_2", "buf0"]


def test_sums_over_a_workspace() -> None:
    found = program(
        ADD,
        """
workspace_0 = empty_strided_cuda((64, ), (1, ), torch.float32)
triton_add.run(primals_1, primals_2, workspace_0, 32, stream=stream0)
buf0 = workspace_0[0 * 4 * 8 : (0 + 1) * 4 * 8].view(4, 8).sum(dim=0)
buf1 = workspace_0[1 * 4 * 8 : (1 + 1) * 4 * 8].view(4, 8).sum(dim=0)
return (buf0, buf1)
""",
    )
    _, first, second = found.launches
    assert named(found, first.reads) == named(found, second.reads) == ["workspace_0"]
    assert (named(found, first.fresh), named(found, second.fresh)) == (["buf0"], ["buf1"])


@pytest.mark.parametrize(
    "statement",
    [
        "u0 = primals_1.item()",
        "buf0 = self.partitions[0](partition0_args)",
        "if primals_1 is not None: pass",
        "buf0 = torch.ops.aten.view.default(primals_1, [32])",
        "buf0 = torch.ops.nobody.knows.default(primals_1)",
        "unknown_kernel.run(primals_1, 32, stream=stream0)",
        "triton_add.run(primals_1, 32, stream=stream0)",
        "buf0 = alloc_from_pool(pool0, 0, torch.float32, (4, ), (1, ))",
    ],
)
def test_statements_that_nobody_knows(statement: str) -> None:
    with pytest.raises(UnknownStatement):
        program(ADD, f"{statement}\nreturn (primals_1, )")


def test_text_that_is_not_python() -> None:
    with pytest.raises(UnknownStatement, match="not Python"):
        read("#include <torch/csrc/inductor/cpp_wrapper/cpu.h>\nvoid call() {}", [])


def golden(network: str, kind: str) -> str:
    """What Inductor 2.11 writes for an H200: flex attention with a score function, two layers of GPT-2 with dropout."""
    packed = Path(__file__).parents[2] / f"golden/compiled_{network}_{kind}.txt.gz"
    return gzip.decompress(packed.read_bytes()).decode()


@pytest.mark.parametrize("network", ["flex", "gpt2"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_every_statement_for_a_gpu_is_known(network: str, kind: str) -> None:
    text = golden(network, kind)
    inputs = re.search(r"def call\(self, args\):\n\s+(.*?) = args", text)
    assert inputs is not None
    found = read(text, [True] * len(inputs[1].rstrip(", ").split(",")))
    assert (
        len(found.launches)
        == {"flex": {"forward": 6, "backward": 2}, "gpt2": {"forward": 41, "backward": 72}}[network][kind]
    )
    impure = [name for name, kernel in kernels_of(text).items() if not kernel.is_pure]
    if kind == "forward":
        assert not impure
    else:
        assert all("embedding_dense_backward" in name for name in impure)


def test_what_flex_attention_writes() -> None:
    def written(kind: str) -> list[str]:
        text = golden("flex", kind)
        ((name, kernel),) = ((name, one) for name, one in kernels_of(text).items() if name.startswith("triton_tem"))
        header = re.search(rf"def {name}\((.*?)\):", text)
        assert header is not None
        return [argument for argument, role in zip(header[1].split(", "), kernel.roles) if role == "rw"]

    assert written("forward") == ["arg_LSE", "arg_MAX", "out_ptr0", "out_ptr1"]
    assert written("backward") == ["arg_DQ", "arg_DV", "out_ptr0"]
