"""Solutions to the exercises of notebooks/05_io_complexity.ipynb."""


def my_block_sizes(sram_elements, d):
    B_c = -(-sram_elements // (4 * d))
    return min(B_c, d), B_c


def my_traffic(n_q, n_k, d, d_v, block_q, block_k):
    T_r = -(-n_q // block_q)
    return n_q * d + T_r * n_k * (d + d_v), n_q * (d_v + 1)


def largest_tile(M, d):
    b = 0
    while 4 * (b + 1) * d + (b + 1) ** 2 + 2 * (b + 1) <= M:
        b += 1
    return b
