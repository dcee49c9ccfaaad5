// The sparse half of a feed-forward layer on CPUs, called by XLA through its foreign function interface.
//
//   gated      r[m, n] = h[m, n] * <x[m], up[n]>   for the active n of row m,   y[m] = sum_n r[m, n] * down[n]
//   non-gated  y[m] = sum_n h[m, n] * down[n]
//
// Order of work: a block of rows, then a tile of 256 neurons, then the rows, then the active neurons of (row, tile).
// So weights come from memory once per block, a slice of a tile and of the rows stay in the L2 cache, and sums stay in
// registers. Dot products are shared out by tile, the sums into y by columns: every number has one owner and one
// order of summation, whatever the number of threads.
//
// Threads are those of XLA's own pool, which is idle while this runs: no core is claimed twice. No -ffast-math: NaN
// and inf must come out as dense arithmetic has them.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kTile = 256;   // neurons of a tile
constexpr int64_t kRows = 256;   // rows of a block
constexpr int64_t kSlice = 256;  // columns of x and up that one pass of dot products covers
constexpr int64_t kColumns = 128;  // columns of y that one task owns

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kRegisters = 8;  // vectors of y held at once
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }

inline float sum(Vec v) {
  float part[kLanes];
  std::memcpy(part, &v, sizeof(v));
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

// What one thread of the pool may still do of tasks 0 .. n - 1. It outlives the call that made it: a thread that
// wakes up late finds nothing left.
struct Work {
  Work(int64_t n, std::function<void(int64_t)> task) : n(n), task(std::move(task)) {}

  void Run() {
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1)) < n; ++mine) task(i);
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    if ((done += mine) == n) finished.notify_all();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done == n; });
  }

  const int64_t n;
  const std::function<void(int64_t)> task;
  std::atomic<int64_t> next{0};
  int64_t done = 0;
  std::mutex mutex;
  std::condition_variable finished;
};

// Runs tasks 0 .. n - 1 on the pool and on this thread, which takes all of them if no other is free.
void ParallelFor(ffi::ThreadPool& pool, int64_t n, std::function<void(int64_t)> task) {
  auto work = std::make_shared<Work>(n, std::move(task));
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  work->Wait();
}

inline bool Active(float h) {  // not (h <= 0), whatever the processor does to subnormals
  uint32_t bits;
  std::memcpy(&bits, &h, sizeof(bits));
  return static_cast<int32_t>(bits) > 0 || bits > 0xFF800000u;
}

inline uint32_t Bf16Bits(float h) {  // round to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &h, sizeof(bits));
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

// Where the activations come from: dense ones before the ReLU, or TwELL words.
struct Source {
  const float* dense;
  const uint32_t* words;
  int64_t n, width;  // columns; words of a (row, tile)

  int64_t tiles() const { return (n + kTile - 1) / kTile; }

  // Writes the active columns (within the tile) and values of one (row, tile), and returns how many there are.
  int64_t Read(int64_t row, int64_t tile, uint8_t* columns, float* values) const {
    int64_t k = 0;
    if (dense != nullptr) {
      const float* h = dense + row * n + tile * kTile;
      const int64_t size = std::min(kTile, n - tile * kTile);
      uint8_t found[kTile + 1];  // the branchless append writes one place ahead
      for (int64_t c = 0; c < size; ++c) {
        found[k] = static_cast<uint8_t>(c);
        k += Active(h[c]);
      }
      for (int64_t i = 0; i < k; ++i) values[i] = h[columns[i] = found[i]];
      return k;
    }
    const uint32_t* w = words + (row * tiles() + tile) * width;
    const int64_t size = std::min<int64_t>(w[0], width - 1);
    for (int64_t i = 1; i <= size; ++i) {
      const int64_t column = w[i] & 0xFFFFu;
      if (column / kTile != tile || column >= n) continue;  // not a word that packing makes
      const uint32_t bits = w[i] & 0xFFFF0000u;
      columns[k] = static_cast<uint8_t>(column % kTile);
      std::memcpy(values + k++, &bits, sizeof(bits));
    }
    return k;
  }
};

// The entries of one tile for a block of rows: those of row m are start[m] .. start[m + 1] - 1, sorted by column.
struct TileEntries {
  std::vector<int32_t> start;
  std::vector<uint8_t> columns;
  std::vector<float> values, dots;

  void Gather(const Source& source, int64_t first_row, int64_t rows, int64_t tile) {
    uint8_t cols[kTile];
    float vals[kTile];
    start.assign(1, 0);
    columns.clear();
    values.clear();
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t k = source.Read(first_row + m, tile, cols, vals);
      columns.insert(columns.end(), cols, cols + k);
      values.insert(values.end(), vals, vals + k);
      start.push_back(static_cast<int32_t>(values.size()));
    }
  }
};

// dots[j] += <x, rows[j]> over `size` columns, for G rows at once.
template <int G>
inline void Dots(const float* x, const float* const* rows, int64_t size, float* dots) {
  Vec acc[G] = {};
  int64_t c = 0;
  for (; c + kLanes <= size; c += kLanes) {
    const Vec v = at(x + c);
    for (int j = 0; j < G; ++j) acc[j] += v * at(rows[j] + c);
  }
  for (int j = 0; j < G; ++j) {
    float total = sum(acc[j]);
    for (int64_t i = c; i < size; ++i) total += x[i] * rows[j][i];
    dots[j] += total;
  }
}

// Multiplies the values of one tile by <x[row], up[column]>.
void MultiplyByUp(TileEntries& tile, const float* x, const float* up, int64_t rows, int64_t k) {
  tile.dots.assign(tile.values.size(), 0.0f);
  for (int64_t from = 0; from < k; from += kSlice) {
    const int64_t size = std::min(kSlice, k - from);
    for (int64_t m = 0; m < rows; ++m) {
      const float* x_row = x + m * k + from;
      int64_t e = tile.start[m];
      const int64_t end = tile.start[m + 1];
      const float* row[4];
      for (; e + 4 <= end; e += 4) {
        for (int j = 0; j < 4; ++j) row[j] = up + tile.columns[e + j] * k + from;
        Dots<4>(x_row, row, size, &tile.dots[e]);
      }
      for (; e < end; ++e) {
        row[0] = up + tile.columns[e] * k + from;
        Dots<1>(x_row, row, size, &tile.dots[e]);
      }
    }
  }
  for (size_t e = 0; e < tile.values.size(); ++e) tile.values[e] *= tile.dots[e];
}

// y[0 .. R * kLanes) += sum of values[e] * down[columns[e]], with y in R registers.
template <int R>
inline void AddRows(const uint8_t* columns, const float* values, int64_t count, const float* down, int64_t l,
                    float* y) {
  Vec acc[R];
  for (int i = 0; i < R; ++i) acc[i] = at(y + i * kLanes);
  for (int64_t e = 0; e < count; ++e) {
    const float* row = down + columns[e] * l;
    for (int i = 0; i < R; ++i) acc[i] += values[e] * at(row + i * kLanes);
  }
  for (int i = 0; i < R; ++i) at(y + i * kLanes) = acc[i];
}

// Adds one tile to columns from .. to of y; `down` is the first row of the tile.
void AddTile(const TileEntries& tile, const float* down, int64_t rows, int64_t l, int64_t from, int64_t to, float* y) {
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t begin = tile.start[m], count = tile.start[m + 1] - begin;
    if (count == 0) continue;
    const uint8_t* columns = tile.columns.data() + begin;
    const float* values = tile.values.data() + begin;
    int64_t c = from;
    for (; c + kRegisters * kLanes <= to; c += kRegisters * kLanes) {
      AddRows<kRegisters>(columns, values, count, down + c, l, y + m * l + c);
    }
    for (; c + kLanes <= to; c += kLanes) AddRows<1>(columns, values, count, down + c, l, y + m * l + c);
    for (; c < to; ++c) {
      float total = y[m * l + c];
      for (int64_t e = 0; e < count; ++e) total += values[e] * down[columns[e] * l + c];
      y[m * l + c] = total;
    }
  }
}

// One layer; `up` null is the non-gated form. m, k, l: rows, input features, output features.
void Ffn(ffi::ThreadPool& pool, const Source& source, const float* x, const float* up, const float* down, int64_t m,
         int64_t k, int64_t l, float* y) {
  std::vector<TileEntries> tiles(source.tiles());
  const int64_t column_tasks = (l + kColumns - 1) / kColumns;
  for (int64_t first = 0; first < m; first += kRows) {
    const int64_t rows = std::min(kRows, m - first);
    ParallelFor(pool, source.tiles(), [&](int64_t t) {
      tiles[t].Gather(source, first, rows, t);
      if (up != nullptr) MultiplyByUp(tiles[t], x + first * k, up + t * kTile * k, rows, k);
    });
    ParallelFor(pool, column_tasks, [&](int64_t task) {
      const int64_t from = task * kColumns, to = std::min(from + kColumns, l);
      float* block = y + first * l;
      for (int64_t row = 0; row < rows; ++row) std::fill(block + row * l + from, block + row * l + to, 0.0f);
      for (int64_t t = 0; t < source.tiles(); ++t) {
        AddTile(tiles[t], down + t * kTile * l, rows, l, from, to, block);
      }
    });
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Words = ffi::Buffer<ffi::U32>;

ffi::Error DenseGated(ffi::ThreadPool pool, Floats x, Floats h, Floats up, Floats down, ffi::ResultBuffer<ffi::F32> y) {
  const Source source = {h.typed_data(), nullptr, h.dimensions()[1], 0};
  Ffn(pool, source, x.typed_data(), up.typed_data(), down.typed_data(), x.dimensions()[0], x.dimensions()[1],
      down.dimensions()[1], y->typed_data());
  return ffi::Error::Success();
}

ffi::Error DensePlain(ffi::ThreadPool pool, Floats h, Floats down, ffi::ResultBuffer<ffi::F32> y) {
  const Source source = {h.typed_data(), nullptr, h.dimensions()[1], 0};
  Ffn(pool, source, nullptr, nullptr, down.typed_data(), h.dimensions()[0], 0, down.dimensions()[1], y->typed_data());
  return ffi::Error::Success();
}

ffi::Error PackedGated(ffi::ThreadPool pool, Floats x, Words words, Floats up, Floats down,
                       ffi::ResultBuffer<ffi::F32> y, int64_t width) {
  const Source source = {nullptr, words.typed_data(), down.dimensions()[0], width};
  Ffn(pool, source, x.typed_data(), up.typed_data(), down.typed_data(), x.dimensions()[0], x.dimensions()[1],
      down.dimensions()[1], y->typed_data());
  return ffi::Error::Success();
}

ffi::Error PackedPlain(ffi::ThreadPool pool, Words words, Floats down, ffi::ResultBuffer<ffi::F32> y, int64_t width) {
  const Source source = {nullptr, words.typed_data(), down.dimensions()[0], width};
  Ffn(pool, source, nullptr, nullptr, down.typed_data(), words.dimensions()[0], 0, down.dimensions()[1],
      y->typed_data());
  return ffi::Error::Success();
}

ffi::Error Pack(ffi::ThreadPool pool, Floats h, ffi::ResultBuffer<ffi::U32> words, int64_t width) {
  const Source source = {h.typed_data(), nullptr, h.dimensions()[1], width};
  const int64_t rows = h.dimensions()[0], tiles = source.tiles(), chunk = 32;
  ParallelFor(pool, (rows + chunk - 1) / chunk, [&](int64_t task) {
    uint8_t columns[kTile];
    float values[kTile];
    for (int64_t i = task * chunk * tiles; i < std::min((task + 1) * chunk, rows) * tiles; ++i) {
      uint32_t* out = words->typed_data() + i * width;
      const int64_t k = source.Read(i / tiles, i % tiles, columns, values);
      std::fill(out, out + width, 0u);
      out[0] = static_cast<uint32_t>(k);
      for (int64_t e = 0; e < std::min(k, width - 1); ++e) {
        out[e + 1] = static_cast<uint32_t>(i % tiles * kTile + columns[e]) | Bf16Bits(values[e]) << 16;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TwellDenseGated, DenseGated,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TwellDensePlain, DensePlain,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TwellPackedGated, PackedGated,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Words>().Arg<Floats>()
                                  .Arg<Floats>().Ret<Floats>().Attr<int64_t>("width"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TwellPackedPlain, PackedPlain,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Words>().Arg<Floats>().Ret<Floats>()
                                  .Attr<int64_t>("width"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TwellPack, Pack,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Words>()
                                  .Attr<int64_t>("width"));
