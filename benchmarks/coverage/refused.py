"""The ops of torch's database that a gather budget of 0 refuses, for all of their calls or for some, and why.

A test compares the list with what is refused: an op that is refused no longer must leave the list, and no other may
come.
"""

from __future__ import annotations

ONE_MATRIX = "a decomposition, a solution or a spectral norm of one matrix; batches of them are cut"
ONE_IMAGE = "one sample of one channel, whose space would have to be cut; samples and channels are"
MEMORY = "it writes at places in memory, or gives memory another size, which shards do not share"
SPARSE = "a sparse tensor has no boxes"
NO_VALUES = "no values to be counted, beside edges that are cut"

REFUSED: dict[str, tuple[str, ...]] = {
    ONE_MATRIX: (
        *("cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "logdet", "lu", "lu_solve", "lu_unpack"),
        *("matrix_exp", "norm.nuc", "ormqr", "pca_lowrank", "pinverse", "qr", "svd", "svd_lowrank", "triangular_solve"),
        *("linalg.cholesky", "linalg.cholesky_ex", "linalg.cond", "linalg.det", "linalg.eig", "linalg.eigh"),
        *("linalg.eigvals", "linalg.eigvalsh", "linalg.householder_product", "linalg.inv", "linalg.inv_ex"),
        *(
            "linalg.ldl_factor",
            "linalg.ldl_factor_ex",
            "linalg.ldl_solve",
            "linalg.lstsq",
            "linalg.lstsq.grad_oriented",
        ),
        *("linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "linalg.lu_solve", "linalg.matrix_norm"),
        *("linalg.matrix_rank", "linalg.matrix_rank.hermitian", "linalg.norm", "linalg.norm.subgradients_at_zero"),
        *("linalg.pinv", "linalg.pinv.hermitian", "linalg.pinv.singular", "linalg.qr", "linalg.slogdet"),
        *("linalg.solve", "linalg.solve_ex", "linalg.solve_triangular", "linalg.svd", "linalg.svdvals"),
        *("linalg.tensorinv", "linalg.tensorsolve"),
    ),
    ONE_IMAGE: (
        *("grid_sampler_3d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d", "nn.functional.conv3d"),
        *("nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d"),
        *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
        "nn.functional.local_response_norm",
    ),
    MEMORY: ("as_strided_scatter", "resize_", "resize_as_"),
    SPARSE: ("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"),
    NO_VALUES: ("histogram", "histogramdd"),
}
