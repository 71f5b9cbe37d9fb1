"""How fast can host memory be pinned? Mapping, touching and registering, apart."""

from __future__ import annotations

import mmap
import time

import torch

GIB = 1024**3


def main() -> None:
    torch.cuda.init()
    try:
        print("thp", open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip())
    except OSError as error:
        print(error)
    print("threads", torch.get_num_threads())
    for huge in (True, False):
        for size in (1 * GIB, 8 * GIB):
            t0 = time.perf_counter()
            area = mmap.mmap(-1, size)
            if huge:
                area.madvise(mmap.MADV_HUGEPAGE)
            content = torch.frombuffer(area, dtype=torch.uint8)
            t1 = time.perf_counter()
            content.zero_()
            t2 = time.perf_counter()
            code = int(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), size, 0))
            t3 = time.perf_counter()
            torch.cuda.cudart().cudaHostUnregister(content.data_ptr())
            t4 = time.perf_counter()
            print(
                f"huge={huge} {size // GIB} GiB: touch {t2 - t1:.2f} s, register {t3 - t2:.2f} s ({code}), unregister {t4 - t3:.2f} s",
                flush=True,
            )
            del content
    area = mmap.mmap(-1, 4 * GIB)
    area.madvise(mmap.MADV_HUGEPAGE)
    content = torch.frombuffer(area, dtype=torch.uint8)
    t2 = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), 4 * GIB, 0))
    print(f"untouched 4 GiB: register {time.perf_counter() - t2:.2f} s ({code})")
    torch.cuda.cudart().cudaHostUnregister(content.data_ptr())
    from concurrent.futures import ThreadPoolExecutor

    area = mmap.mmap(-1, 8 * GIB)
    area.madvise(mmap.MADV_HUGEPAGE)
    content = torch.frombuffer(area, dtype=torch.uint8)
    content.zero_()
    part = GIB // 2
    t2 = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(lambda i: torch.cuda.cudart().cudaHostRegister(content.data_ptr() + i * part, part, 0), range(16))
        )
    print(f"8 GiB in 16 threads: register {time.perf_counter() - t2:.2f} s")
    dev = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    pageable = torch.empty(GIB, dtype=torch.uint8)
    for label, host in (("fresh pageable", pageable), ("touched pageable", pageable), ("pinned", content[: GIB // 2])):
        torch.cuda.synchronize()
        t2 = time.perf_counter()
        host.copy_(dev[: host.numel()])
        torch.cuda.synchronize()
        print(f"copy out, {label}: {host.numel() / (time.perf_counter() - t2) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
