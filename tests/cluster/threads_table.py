"""What the first puzzle's lab prints on the eight ranks of a cluster."""

from labkit.scenarios.toy_captioner import gradient_norms, seeded_toy_captioner, seeded_toy_data


def expect_the_threads_table(lines: list[str]) -> None:
    """One table for all ranks, with the norms of one process that has all eight samples."""
    data, model = seeded_toy_data(samples=8), seeded_toy_captioner()
    model(*data.tensors).backward()
    rows = [line.split() for line in lines]
    assert lines.count("equal on ranks 0–7") == 1
    for name, norm in gradient_norms(model).items():
        assert [row[1:] for row in rows if row and row[0] == name] == [[f"{norm:.4f}"] * 3]
    assert "largest difference between the three, on any rank: < 1e-06" in lines
