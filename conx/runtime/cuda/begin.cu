// What all kernels share. It stands before every group of sources that is compiled (sources.py has the table); they
// include nothing, so that NVRTC needs no headers.
//
// Every parameter of a kernel is 8 bytes wide, a pointer or a long long. Kernels are written in phases: EACH_THREAD
// runs its block for the thread of that number, and SYNC lies between phases. A compiler for the host (tests) defines
// CONX_HOST and turns the phases into loops over a block's threads; that is why nothing lives in registers from one
// phase to the next.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 256
#define RESTRICT __restrict__   // what is read is not written: loads need not wait for stores
#define GROUP 4                  // elements that a thread reads, and writes, at once
#define ROUNDS 4                 // groups that a thread works on
#define TILE (THREADS * GROUP * ROUNDS)  // elements of a block

// What kernels find wrong with what they are given, as bits of flags.
#define BAD_COUNT 1   // there are more or fewer escapes than escaped fields
#define BAD_UNUSED 2  // unused bits of the last byte are not zero
#define BAD_INDEX 4   // an index is not in the palette

#ifndef CONX_HOST
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define DEVICE __device__ __forceinline__
#define EACH_THREAD for (int thread = threadIdx.x, once = 1; once; once = 0)
#define SYNC __syncthreads()
#define SHARED __shared__
#ifndef UNROLL
#define UNROLL _Pragma("unroll")
#endif
#define MULTIPLY_HIGH(a, b) __umulhi(a, b)
#define RAISE(flags, bits) atomicOr(flags, bits)

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE double double_of(u64 bits) { return __longlong_as_double((i64)bits); }

// To nearest, ties to even; overflow to infinity. PTX ISA, cvt.
DEVICE u16 half_of(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// A divisor d, and for d up to 2 * TILE also ceil(2^32 / d) (0 for d = 1): quotients by one multiplication.
struct Divisor {
    i64 d;
    u32 inverse;
};

DEVICE Divisor divisor(i64 d) {
    Divisor made = {d, 0};
    if (d > 1 && d <= 2 * TILE) made.inverse = (u32)((0x100000000ULL + (u64)d - 1) / (u64)d);
    return made;
}

// x / by.d for x < 2 * d where d > 2 * TILE, and for x < 2^16 otherwise: there x * (d - 1) < 2^32, so it is exact.
DEVICE i64 quotient(i64 x, const Divisor& by) {
    if (by.d > 2 * TILE) return x >= by.d;
    return by.d == 1 ? x : (i64)MULTIPLY_HIGH((u32)x, by.inverse);
}

// Whether addresses lie on multiples of `size` bytes.
DEVICE bool aligned(const void* a, u32 size) { return ((u64)a & (size - 1)) == 0; }

// The first element of a thread's group in a round, counted from the first of its block.
DEVICE i64 ahead_of(int round, int thread) { return (i64)(round * THREADS + thread) * GROUP; }

// The bits of four elements, stored at once where the address allows.
DEVICE void put(u16* out, const u32* bits, i64 count, bool whole) {
    if (whole && count >= GROUP) {
        u64 all = (u64)(bits[0] | bits[1] << 16) | (u64)(bits[2] | bits[3] << 16) << 32;
        *(u64*)out = all;
        return;
    }
    UNROLL
    for (int j = 0; j < GROUP; ++j)
        if (j < count) out[j] = (u16)bits[j];
}

struct alignas(16) Four {
    u32 x, y, z, w;
};

DEVICE void put(u32* out, const u32* bits, i64 count, bool whole) {
    if (whole && count >= GROUP) {
        Four all = {bits[0], bits[1], bits[2], bits[3]};
        *(Four*)out = all;
        return;
    }
    UNROLL
    for (int j = 0; j < GROUP; ++j)
        if (j < count) out[j] = bits[j];
}

// Four bytes, the first in the lowest bits; bytes beyond `count` are zero.
DEVICE u32 get(const u8* in, i64 count, bool whole) {
    if (whole && count >= GROUP) return *(const u32*)in;
    u32 bits = 0;
    UNROLL
    for (int j = 0; j < GROUP; ++j)
        if (j < count) bits |= (u32)in[j] << 8 * j;
    return bits;
}
