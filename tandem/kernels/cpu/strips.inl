// What the products of all instruction sets share: how strips are divided among members, and what is done with a result.

// Strips of all matrices one after another: the shared numbers that members take stand for runs of strips, long enough
// that reading stays sequential, short enough that the members end together.
struct Strips {
    int64_t total = 0, run = 1;
    const Product &p;
    Strips(const Product &p, int members) : p(p) {
        for (int64_t i = 0; i < p.count; i++) total += round_up(p.matrices[i].n, kStrip) / kStrip;
        run = total / (members * 6);
        if (run < 1) run = 1;
    }
    // The matrix that strip `index` belongs to, `index` within it, and the first column of its outputs in y.
    const Matrix &find(int64_t &index, int64_t &column) const {
        column = 0;
        const Matrix *m = p.matrices;
        for (;; m++) {
            const int64_t strips = round_up(m->n, kStrip) / kStrip;
            if (index < strips) return *m;
            index -= strips;
            column += m->n;
        }
    }
    // Call each(strip number) for this member's share.
    template <class Each>
    void share(Member &member, const Each &each) const {
        for (int64_t first; (first = member.take() * run) < total;) {
            for (int64_t strip = first; strip < first + run && strip < total; strip++) each(strip);
        }
    }
};

// e^x to about 2 units in the last place, in plain arithmetic that a compiler vectorises: 2^n times a polynomial in the rest,
// |rest| <= ln(2) / 2, with the Taylor coefficients. Beyond +-87 it stays at the value there.
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to a whole number
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;    // ln(2) in two parts
    float y = 1.0f / 5040.0f;
    y = y * r + 1.0f / 720.0f;
    y = y * r + 1.0f / 120.0f;
    y = y * r + 1.0f / 24.0f;
    y = y * r + 1.0f / 6.0f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * std::bit_cast<float>((int32_t(n) + 127) << 23);
}

// Hand over the products of one strip for one row: acc[32].
static void finish(const Product &p, const float *acc, int64_t row, int64_t column, int64_t outputs) {
    if (p.then == SWIGLU) {
        uint16_t *out = static_cast<uint16_t *>(p.y) + row * p.y_stride + column / 2;
        const int64_t left = p.y_stride - column / 2;  // rows of zeros may fill gate and up
        float inner[16];
        for (int i = 0; i < 16; i++) inner[i] = acc[i] / (1.0f + exponential(-acc[i])) * acc[16 + i];
        for (int64_t i = 0; i < 16 && i < left; i++) out[i] = to_bf16(inner[i]);
        return;
    }
    float *y = static_cast<float *>(p.y) + row * p.y_stride + column;
    for (int64_t i = 0; i < outputs; i++) {
        const float v = p.bias == nullptr ? acc[i] : acc[i] + p.bias[column + i];
        y[i] = p.then == ADD ? y[i] + v : v;
    }
}

static int64_t outputs_of(const Matrix &m, int64_t strip) { return m.n - strip * 32 < 32 ? m.n - strip * 32 : 32; }
