// One value everywhere, and the exchange of two axes.

template <typename V> DEVICE void fill(u32 value, i64 count, V* out) {
    i64 tile = (i64)blockIdx.x * TILE;
    EACH_THREAD {
        bool wide = aligned(out, GROUP * sizeof(V));
        u32 bits[GROUP] = {value, value, value, value};
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread);
            if (at < count) put(out + at, bits, count - at, wide);
        }
    }
}

KERNEL fill_2(i64 value, i64 count, u16* out) { fill<u16>((u32)value, count, out); }
KERNEL fill_4(i64 value, i64 count, u32* out) { fill<u32>((u32)value, count, out); }

#define SQUARE 32  // a block moves a square of so many rows and columns, a thread four elements of it

// Elements first … first+count of a matrix of `columns` columns, row-major, to where its transpose of `rows` columns
// has them. `values` begins with element `first`. A block's x goes along columns, its y along the rows that are there.
template <typename V> DEVICE void transpose(const V* values, i64 first, i64 count, i64 rows, i64 columns, V* out) {
    SHARED V square[SQUARE][SQUARE + 1];
    i64 top = first / columns + (i64)blockIdx.y * SQUARE, left = (i64)blockIdx.x * SQUARE;
    EACH_THREAD {
        for (int y = thread / SQUARE; y < SQUARE; y += THREADS / SQUARE) {
            int x = thread % SQUARE;
            i64 at = (top + y) * columns + left + x - first;
            if (left + x < columns && at >= 0 && at < count) square[y][x] = values[at];
        }
    }
    SYNC;
    EACH_THREAD {
        for (int x = thread / SQUARE; x < SQUARE; x += THREADS / SQUARE) {
            int y = thread % SQUARE;
            i64 at = (top + y) * columns + left + x - first;
            if (left + x < columns && at >= 0 && at < count) out[(left + x) * rows + top + y] = square[y][x];
        }
    }
}

KERNEL transpose_2(const u16* values, i64 first, i64 count, i64 rows, i64 columns, u16* out) {
    transpose<u16>(values, first, count, rows, columns, out);
}
KERNEL transpose_4(const u32* values, i64 first, i64 count, i64 rows, i64 columns, u32* out) {
    transpose<u32>(values, first, count, rows, columns, out);
}
