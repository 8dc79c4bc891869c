"""Tables 3 to 5 and appendix A of the Striped Attention paper (arXiv 2311.09431), from a transcription.

A line has hardware, model and mesh (model parallel x sequence parallel), then triples of tokens, theoretical
maximum speed-up and measured speed-up. Tables 3 to 5 repeat rows of the appendix. In the 137 rows, the
model 1B has the same measured speed-ups as the model 3B on TPU v3.
"""

from __future__ import annotations

Row = tuple[int, float, float]

TABLE = """
A100 1b 1x2 | 8Ki 1.22 0.94 | 16Ki 1.31 1.02 | 32Ki 1.38 1.10 | 48Ki 1.41 1.14 | 64Ki 1.43 1.19 | 96Ki 1.45 1.22 | 128Ki 1.46 1.25
A100 1b 1x4 | 16Ki 1.46 0.92 | 32Ki 1.57 1.07 | 64Ki 1.65 1.23 | 96Ki 1.68 1.31 | 128Ki 1.70 1.35 | 192Ki 1.71 1.39
A100 1b 1x8 | 32Ki 1.67 0.93 | 64Ki 1.76 1.11 | 128Ki 1.81 1.29 | 192Ki 1.83 1.37
A100 1b 2x2 | 8Ki 1.22 0.94 | 16Ki 1.31 1.04 | 32Ki 1.38 1.11 | 48Ki 1.41 1.18 | 64Ki 1.43 1.21 | 96Ki 1.45 1.25 | 128Ki 1.46 1.25
A100 1b 2x4 | 16Ki 1.46 0.95 | 32Ki 1.57 1.07 | 64Ki 1.65 1.22 | 96Ki 1.68 1.30 | 128Ki 1.70 1.35 | 192Ki 1.71 1.40 | 256Ki 1.72 1.41
A100 1b 4x2 | 8Ki 1.22 0.96 | 16Ki 1.31 1.06 | 32Ki 1.38 1.11 | 48Ki 1.41 1.15 | 64Ki 1.43 1.20 | 96Ki 1.45 1.23 | 128Ki 1.46 1.24
A100 3b 2x2 | 8Ki 1.17 0.96 | 16Ki 1.26 1.04 | 32Ki 1.34 1.11 | 48Ki 1.38 1.18 | 64Ki 1.40 1.22 | 96Ki 1.43 1.25 | 128Ki 1.45 1.27
A100 3b 2x4 | 16Ki 1.38 0.94 | 32Ki 1.51 1.09 | 64Ki 1.61 1.23 | 96Ki 1.65 1.32 | 128Ki 1.67 1.36 | 192Ki 1.69 1.43 | 256Ki 1.71 1.45
A100 3b 4x2 | 8Ki 1.17 0.97 | 16Ki 1.26 1.04 | 32Ki 1.34 1.13 | 48Ki 1.38 1.20 | 64Ki 1.40 1.22 | 96Ki 1.43 1.26 | 128Ki 1.45 1.27
A100 7b 2x2 | 8Ki 1.15 0.93 | 16Ki 1.23 1.03 | 32Ki 1.31 1.11 | 48Ki 1.36 1.16 | 64Ki 1.38 1.20 | 96Ki 1.42 1.23 | 128Ki 1.43 1.25
A100 7b 2x4 | 16Ki 1.34 0.94 | 32Ki 1.47 1.07 | 64Ki 1.58 1.23 | 96Ki 1.62 1.30 | 128Ki 1.65 1.36 | 192Ki 1.68 1.39 | 256Ki 1.70 1.43
A100 7b 4x2 | 8Ki 1.15 0.98 | 16Ki 1.23 1.03 | 32Ki 1.31 1.12 | 48Ki 1.36 1.18 | 64Ki 1.38 1.20 | 96Ki 1.42 1.23 | 128Ki 1.43 1.25
TPUv3 1b 2x4 | 16Ki 1.33 1.12 | 32Ki 1.46 1.27 | 64Ki 1.57 1.41 | 96Ki 1.62 1.47
TPUv3 1b 4x2 | 8Ki 1.14 1.07 | 16Ki 1.22 1.16 | 32Ki 1.31 1.25 | 48Ki 1.35 1.30
TPUv3 3b 2x4 | 16Ki 1.26 1.12 | 32Ki 1.38 1.27 | 64Ki 1.51 1.41 | 96Ki 1.57 1.47
TPUv3 3b 4x2 | 8Ki 1.10 1.07 | 16Ki 1.17 1.16 | 32Ki 1.26 1.25 | 48Ki 1.31 1.30
TPUv4 1b 2x8 | 32Ki 1.54 1.06 | 128Ki 1.76 1.26 | 256Ki 1.81 1.37 | 384Ki 1.83 1.43 | 512Ki 1.84 1.47 | 640Ki 1.85 1.49 | 768Ki 1.85 1.51
TPUv4 1b 4x4 | 16Ki 1.33 1.06 | 64Ki 1.57 1.22 | 128Ki 1.65 1.31 | 192Ki 1.68 1.36 | 256Ki 1.70 1.39 | 320Ki 1.71 1.40 | 384Ki 1.71 1.42
TPUv4 3b 2x8 | 32Ki 1.45 1.09 | 128Ki 1.71 1.36 | 256Ki 1.78 1.50 | 384Ki 1.81 1.57 | 512Ki 1.83 1.60 | 640Ki 1.84 1.63 | 768Ki 1.84 1.65
TPUv4 3b 4x4 | 16Ki 1.26 1.05 | 64Ki 1.51 1.22 | 128Ki 1.61 1.32 | 192Ki 1.65 1.38 | 256Ki 1.67 1.41 | 320Ki 1.68 1.43 | 384Ki 1.69 1.45
TPUv4 7b 2x8 | 32Ki 1.40 1.07 | 128Ki 1.67 1.30 | 256Ki 1.76 1.44 | 384Ki 1.80 1.51 | 512Ki 1.81 1.56 | 640Ki 1.83 1.59
TPUv4 7b 4x4 | 16Ki 1.22 1.04 | 64Ki 1.47 1.18 | 128Ki 1.58 1.28 | 192Ki 1.62 1.33 | 256Ki 1.65 1.37 | 320Ki 1.67 1.40 | 384Ki 1.68 1.41
"""


def _row(text: str) -> Row:
    tokens, maximum, measured = text.split()
    return int(tokens.removesuffix("Ki")) * 1024, float(maximum), float(measured)


ROWS: dict[tuple[str, str, tuple[int, int]], tuple[Row, ...]] = {}
for line in TABLE.strip().splitlines():
    (device, model, mesh), rows = line.split("|")[0].split(), line.split("|")[1:]
    parallel = tuple(map(int, mesh.split("x")))
    ROWS[device, f"striped-{model}", (parallel[0], parallel[1])] = tuple(map(_row, rows))
