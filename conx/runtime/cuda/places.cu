// Which parameter (scale, zero point, palette) belongs to which element: conx/codecs/layout.py in integers.
//
// A tensor in stored order is seen as (outer, length, inner), with a parameter for each `block` positions of the middle
// axis (the last block may be shorter). If shared, all outer and inner positions have the same ones.

struct Layout {
    i64 length, inner, block, blocks;
    bool shared;
};

// An element's position: o outermost, l along the axis, which is position r of block b, i innermost.
struct Place {
    i64 o, l, b, r, i;
};

struct Places {
    Layout of;
    Divisor inner, length, block;
    Place first;
};

DEVICE Places places(const Layout& of, i64 first) {
    Places p;
    p.of = of;
    p.inner = divisor(of.inner);
    p.length = divisor(of.length);
    p.block = divisor(of.block);
    i64 row = first / of.inner;
    p.first.i = first - row * of.inner;
    p.first.o = row / of.length;
    p.first.l = row - p.first.o * of.length;
    p.first.b = p.first.l / of.block;
    p.first.r = p.first.l - p.first.b * of.block;
    return p;
}

// The place of the element `ahead` < TILE after the first: every quotient is of a small number or is 0 or 1.
DEVICE Place place(const Places& p, i64 ahead) {
    Place at = p.first;
    i64 x = at.i + ahead;
    if (p.of.inner <= 2 * TILE || x >= p.of.inner) {
        i64 rows = quotient(x, p.inner);
        at.i = x - rows * p.of.inner;
        i64 y = at.l + rows, wraps = quotient(y, p.length);
        at.o += wraps;
        at.l = y - wraps * p.of.length;
        if (wraps || p.of.length <= 2 * TILE) {
            at.b = quotient(at.l, p.block);
            at.r = at.l - at.b * p.of.block;
        } else {
            i64 z = at.r + rows, more = quotient(z, p.block);
            at.b += more;
            at.r = z - more * p.of.block;
        }
    } else {
        at.i = x;
    }
    return at;
}

DEVICE void step(const Places& p, Place& at) {
    if (++at.i < p.of.inner) return;
    at.i = 0;
    ++at.l;
    if (++at.r == p.of.block) {
        at.r = 0;
        ++at.b;
    }
    if (at.l < p.of.length) return;
    at.l = at.b = at.r = 0;
    ++at.o;
}

DEVICE i64 parameter(const Places& p, const Place& at) {
    return p.of.shared ? at.b : (at.o * p.of.blocks + at.b) * p.of.inner + at.i;
}

// How the parameters of a group of four elements lie, the group beginning at a multiple of four.
enum Run { SAME, CONSECUTIVE, ANY };
