// Codes on a uniform grid (spec/codecs/linear.md): value = float32(code - zero point) * float32(scale).

// The float32 scales of log codes: base * T[c mod 8] * 2^-(c div 8), every product rounded.
KERNEL log8(const u8* codes, i64 count, i64 base_bits, u32* scales) {
    EACH_THREAD {
        const u32 octave[8] = {0x3F800000, 0x3F6AC0C7, 0x3F5744FD, 0x3F45672A,
                               0x3F3504F3, 0x3F25FED7, 0x3F1837F0, 0x3F0B95C2};
        for (i64 at = (i64)blockIdx.x * TILE + thread; at < count && at < ((i64)blockIdx.x + 1) * TILE; at += THREADS) {
            u32 code = codes[at];
            float step = float_of((u32)base_bits) * float_of(octave[code & 7]);
            scales[at] = bits_of(step * float_of((127 - (code >> 3)) << 23));
        }
    }
}

template <int T> DEVICE u32 narrowed(float value, bool bounded) {
    if (T == F32) return bits_of(value);
    if (T == BF16) return float32_to_bfloat16(value);
    return bounded ? half_of(value) : float32_to_float16(value);
}

// `flip` is 0x80 for int8 codes, which makes them unsigned, and 0 for uint8; `zero` is the zero point moved likewise.
// Zero points of their own, if there are any, lie beside the scales. `bounded`: no value overflows the target.
template <int T>
DEVICE void linear(const u8* RESTRICT codes, i64 first, i64 count, const float* RESTRICT scales,
                   const u8* RESTRICT zeros, const Layout& layout, int flip, int zero, int run, bool bounded,
                   typename Bits<T>::type* RESTRICT out) {
    i64 tile = (i64)blockIdx.x * TILE;
    EACH_THREAD {
        bool whole = aligned(codes, GROUP) && aligned(out, GROUP * sizeof(*out));
        u32 read[ROUNDS], bits[GROUP];  // all is asked for before any of it is waited for
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread);
            read[round] = at < count ? get(codes + at, count - at, whole) : 0;
        }
        Places where = places(layout, first + tile);
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 ahead = ahead_of(round, thread), at = tile + ahead, left = count - at;
            if (left <= 0) continue;
            u32 four = read[round] ^ (u32)flip * 0x01010101u;
            Place place_of = place(where, ahead);
            i64 p = parameter(where, place_of);
            float scale = scales[p];
            int base = zeros ? (int)(zeros[p] ^ flip) : zero;
            UNROLL
            for (int j = 0; j < GROUP; ++j) {
                if (j && j < left && run != SAME) {
                    if (run == CONSECUTIVE) {
                        ++p;
                    } else {
                        step(where, place_of);
                        p = parameter(where, place_of);
                    }
                    scale = scales[p];
                    if (zeros) base = (int)(zeros[p] ^ flip);
                }
                bits[j] = narrowed<T>((float)((int)(four >> 8 * j & 0xFF) - base) * scale, bounded);
            }
            put(out + at, bits, left, whole);
        }
    }
}

#define LINEAR(T, name)                                                                                              \
    KERNEL linear_##name(const u8* RESTRICT codes, i64 first, i64 count, const float* RESTRICT scales,               \
                         const u8* RESTRICT zeros, i64 length, i64 inner, i64 block, i64 blocks, i64 shared,         \
                         i64 flip, i64 zero, i64 run, i64 bounded, Bits<T>::type* RESTRICT out) {                    \
        Layout layout = {length, inner, block, blocks, shared != 0};                                                 \
        linear<T>(codes, first, count, scales, zeros, layout, (int)flip, (int)zero, (int)run, bounded != 0, out);    \
    }

LINEAR(F32, float32)
LINEAR(F16, float16)
LINEAR(BF16, bfloat16)
