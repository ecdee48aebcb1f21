// Indices into few values (spec/codecs/palette.md). The values are in the target's type already.

// Indices of four elements, the first of which is a multiple of four, a byte each.
DEVICE u32 four_indices(const u8* packed, i64 at, i64 left, int per_byte, bool whole) {
    if (per_byte == 1) return get(packed + at, left, whole);
    int bits = 8 / per_byte;
    u32 four = 0, mask = (1u << bits) - 1;
    for (int j = 0; j < GROUP; ++j)
        if (j < left) four |= ((u32)packed[(at + j) / per_byte] >> (at + j) % per_byte * bits & mask) << 8 * j;
    return four;
}

template <typename V>
DEVICE void palette(const u8* RESTRICT packed, i64 first, i64 count, int per_byte, const V* RESTRICT values,
                    i64 entries, const Layout& layout, V* RESTRICT out, u32* flags) {
    i64 tile = (i64)blockIdx.x * TILE;
    EACH_THREAD {
        bool whole = aligned(packed, GROUP) && aligned(out, GROUP * sizeof(V));
        u32 read[ROUNDS], bits[GROUP];
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread);
            read[round] = at < count ? four_indices(packed, at, count - at, per_byte, whole) : 0;
        }
        Places where = places(layout, first + tile);
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 ahead = ahead_of(round, thread), at = tile + ahead, left = count - at;
            if (left <= 0) continue;
            u32 four = read[round];
            Place place_of = place(where, ahead);
            for (int j = 0; j < GROUP; ++j) {
                if (j) step(where, place_of);
                u32 index = four >> 8 * j & 0xFF;
                if (j < left && index >= entries) RAISE(flags, BAD_INDEX);
                bits[j] = j < left && index < entries ? (u32)values[place_of.b * entries + index] : 0;
            }
            put(out + at, bits, left, whole);
            if (at + GROUP >= count && count % per_byte) {  // the unused bits of the last byte
                u32 last = (u32)packed[count / per_byte] >> count % per_byte * (8 / per_byte);
                if (last) RAISE(flags, BAD_UNUSED);
            }
        }
    }
}

#define PALETTE(V, size)                                                                                           \
    KERNEL palette_##size(const u8* RESTRICT packed, i64 first, i64 count, i64 per_byte, const V* RESTRICT values, \
                          i64 entries, i64 length, i64 inner, i64 block, i64 blocks, V* RESTRICT out,              \
                          u32* flags) {                                                                            \
        Layout layout = {length, inner, block, blocks, true};                                                      \
        palette<V>(packed, first, count, (int)per_byte, values, entries, layout, out, flags);                      \
    }

PALETTE(u16, 2)
PALETTE(u32, 4)
