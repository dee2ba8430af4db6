"""Traffic in pictures is what `Memory` counted, and lies on the closed forms."""

from flashref import io_model, plots


def test_traffic_markers_are_counted_and_lie_on_the_closed_form():
    picture = plots.traffic_by_block(n=24, d=4, blocks=(4, 7, 24))
    lines = {line.get_linestyle(): line for line in picture.figure.axes[0].lines}
    marked = [line for line in picture.figure.axes[0].lines if line.get_marker() in ("o", "s")]
    assert len(marked) == 2
    for line, closed_form in zip(marked, (io_model.fa1_traffic, io_model.fa2_traffic), strict=True):
        for block, moved in line.get_xydata():
            tiles = dict(block_q=int(block), block_k=int(block))
            assert moved == sum(closed_form(24, 24, 4, 4, **tiles))
    assert lines["-"] is not None
    assert f"{sum(io_model.standard_traffic(24, 24, 4, 4)) / 1e6:.2f}" in picture.alt
