"""When each warpgroup of `hopper` does what, on a card: lesson 11's timetable, measured.

    python -m flashref.tests.cuda.timeline [--d 128 ...] [--n 8192] [--json FILE] [--into RESULTS]

Compiles the kernel with other instructions in place of a few of its own: each does the same and
then writes the multiprocessor's clock to device memory, from the first thread of each warpgroup of
one block. What that costs is measured, too: `slower` is the kernel's time with the stopwatches over
its time without. `--into` writes what was found into a file of `bench gpu`.
"""

import argparse
import json
import statistics
import sys
import types
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np

KINDS = (
    "asks for its turn", "has its turn", "started products", "has S", "asks for O", "has O",
)  # fmt: skip
ROOM, TICK = 2**14, 16  # events of a warpgroup; clocks between two of them, at least


def stopwatches(hx, address, block):
    """Return the instructions of `ptx_hopper`, some of which note the clock: see `KINDS`.

    The place of an event follows from its clock, so that nothing need be counted: after ROOM · TICK
    clocks they start over. Of two events in one TICK, the second remains.
    """

    def note(kind):
        return (
            "{ .reg .pred p; .reg .u32 a, t, w; .reg .u64 to, more; "
            "mov.u32 w, %tid.x; and.b32 t, w, 127; setp.eq.u32 p, t, 0; shr.u32 w, w, 7; "
            f"mov.u32 t, %ctaid.x; setp.eq.and.u32 p, t, {block}, p; "
            f"mov.u32 t, %clock; shr.u32 a, t, {TICK.bit_length() - 1}; and.b32 a, a, {ROOM - 1}; "
            f"mad.lo.u32 a, w, {ROOM}, a; mul.wide.u32 more, a, 8; "
            f"mov.u64 to, {address}; add.u64 to, to, more; "
            f"@p st.global.v2.u32 [to], {{ {kind + 1}, t }}; }}"
        )

    u32 = hx.U32
    module = types.ModuleType("ptx_hopper_with_stopwatches")
    vars(module).update(vars(hx))
    module.named_sync = hx.instruction(
        f"{note(0)} bar.sync $0, $1; {note(1)}", [u32, u32], (), True
    )
    module.wgmma_commit = hx.instruction(
        f"wgmma.commit_group.sync.aligned; {note(2)}", touches_memory=True
    )

    def wait_products(pending, count):
        text = f"wgmma.wait_group.sync.aligned {pending};"
        before, after = ("", note(3)) if pending else (note(4), note(5))
        return hx.on_registers(f"{before} {text} {after}", count)

    module.wait_products = wait_products
    return module


def traced(schedule, D, address, block=0):
    """Return the kernel with stopwatches, and the patches under which it must be compiled."""
    from flashref.cuda import hopper, hopper_tiles, ptx_hopper

    module = stopwatches(ptx_hopper, address, block)
    patches = [mock.patch.object(x, "hx", module) for x in (hopper, hopper_tiles)]
    for patch in patches:
        patch.start()
    return hopper.forward_kernel.__wrapped__(D, "float16", schedule, False, False), patches


def events(words):
    """Return the events of each warpgroup as pairs of kind and clock, in order.

    Of the last ROOM · TICK clocks: of what came before, some events are overwritten.
    """
    found = []
    for mine in words.reshape(-1, ROOM, 2).astype(np.int64):
        kinds, clocks = mine[mine[:, 0] > 0].T
        if len(clocks) and np.ptp(clocks) > 2**31:  # the 32 bits overflowed meanwhile
            clocks = np.where(clocks < 2**31, clocks + 2**32, clocks)
        order = np.argsort(clocks)
        order = order[clocks[order] > clocks.max(initial=0) - ROOM * TICK]
        found.append(list(zip((kinds[order] - 1).tolist(), clocks[order].tolist(), strict=True)))
    return found


def measure(d, n, window):
    """Return the events of `window` clocks from the middle of a block's work, and what it cost."""
    import torch

    from flashref.cuda import bench, hopper

    setting = bench.Setting(n, d, causal=False)
    inputs = bench.Inputs(torch, setting)
    schedule = hopper.schedule_for(d, n, hides=False)
    plain = bench._step(schedule, inputs)
    right = plain()
    words = torch.zeros(5 * ROOM * 2, dtype=torch.int32, device="cuda")
    kernel, patches = traced(schedule, d, words.data_ptr())

    def watched():
        with mock.patch.object(hopper, "forward_kernel", lambda *_: kernel):
            return plain()

    try:
        assert torch.equal(watched(), right), "with stopwatches, something else is computed"
    finally:
        for patch in patches:
            patch.stop()
    noted = events(words.cpu().numpy().view(np.uint32))
    ms = [[bench.burst(torch, call, 5) for call in (plain, watched)] for _ in range(5)]
    slower = statistics.median(x[1] for x in ms) / statistics.median(x[0] for x in ms)
    return {
        "d": d, "n": n, "causal": False, "schedule": asdict(schedule), "kinds": list(KINDS),
        "slower": round(slower, 3),
        "warpgroups": in_window(noted[1 : 1 + schedule.warpgroups], window),
    }  # fmt: skip


def in_window(noted, window):
    """Return the events of `window` clocks, from the middle of what the first warpgroup did."""
    middle = noted[0][len(noted[0]) // 2 :]
    start = next(clock for kind, clock in middle if kind == 1)
    cut = [[(kind, clock - start) for kind, clock in mine] for mine in noted]
    return [[event for event in mine if 0 <= event[1] <= window] for mine in cut]


def main(argv=None):
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d", type=int, nargs="+", default=[128])
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--window", type=int, default=12_000, help="clocks (default 12,000)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--into", metavar="RESULTS")
    args = parser.parse_args(argv)
    found = [measure(d, args.n, args.window) for d in args.d]
    text = json.dumps(found)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.into:
        results = json.loads(Path(args.into).read_text(encoding="utf-8"))
        results["timelines"] = found
        Path(args.into).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
