// The CUDA steps of line selection and attention over lines, launcher by launcher: the choice and its tiles bit by bit
// against the host's on weights whose sums are exact, weights and attention against the reference. Skips without a GPU.
#include <bit>
#include <set>

#include "kernels/attention/attention_cuda.h"
#include "kernels/selection/loopserve/line_tiles.h"
#include "kernels/selection/loopserve/select_lines_cuda.h"
#include "tests/kernels/support/cuda_test_util.h"
#include "tests/kernels/support/paged_kv.h"
#include "tests/kernels/support/planted_lines.h"

namespace spl::kernels::cuda {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class DeviceMemory {
 public:
  DeviceMemory(size_t bytes, int byte) {
    CHECK_CUDA(cudaMalloc(&p_, std::max<size_t>(bytes, 1)));
    CHECK_CUDA(cudaMemset(p_, byte, std::max<size_t>(bytes, 1)));
  }
  template <typename T>
  explicit DeviceMemory(const std::vector<T>& v) : DeviceMemory(v.size() * sizeof(T), 0) {
    CHECK_CUDA(cudaMemcpy(p_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceMemory(DeviceMemory&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  ~DeviceMemory() { (void)cudaFree(p_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(p_);
  }

 private:
  void* p_ = nullptr;
};

template <typename T>
std::vector<T> Read(const T* device, size_t count) {
  std::vector<T> v(count);
  CHECK_CUDA(cudaMemcpy(v.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

// K and V of one sequence, on both sides.
struct Sequence {
  Sequence(Random& random, DType dtype, int32_t dim, int32_t kv_heads, int32_t length)
      : host(dtype, dim, kv_heads * ((length + 63) / 64) + 3), page_stride((length + 63) / 64) {
    host.Shuffle(random);
    std::vector<int32_t> table;
    for (int32_t h = 0; h < kv_heads; ++h) {
      streams.push_back(MakeStream(random, length, dim));
      host.Place(streams.back());
      table.insert(table.end(), streams.back().page_table.begin(), streams.back().page_table.end());
    }
    for (const TestStream& s : streams) views.push_back(s.view());
    const size_t bytes = host.view().page_bytes() * host.view().num_pages;
    Keep(DeviceMemory(std::vector<std::byte>(host.view().base, host.view().base + bytes)));
    batch.pool = host.view();
    batch.pool.base = kept.back().as<std::byte>();
    batch.page_tables = Keep(DeviceMemory(table)).as<int32_t>();
    batch.table_offset = Keep(DeviceMemory(std::vector<int64_t>{0})).as<int64_t>();
    batch.head_stride = page_stride;
    batch.kv_len = Keep(DeviceMemory(std::vector<int32_t>{length})).as<int32_t>();
    batch.num_sequences = 1;
  }
  // NaN on the device.
  void Poison(int32_t head, int32_t page) {
    const int32_t physical = streams[static_cast<size_t>(head)].page_table[static_cast<size_t>(page)];
    CHECK_CUDA(cudaMemset(batch.pool.k(physical), 0xff, batch.pool.page_bytes()));
  }
  DeviceMemory& Keep(DeviceMemory m) { return kept.emplace_back(std::move(m)); }

  TestPool host;
  int64_t page_stride;
  std::vector<TestStream> streams;
  std::vector<HeadStreamView> views;
  std::vector<DeviceMemory> kept;
  PagedBatch batch;
};

// Values that both sides hold exactly.
std::vector<float> Rounded(std::vector<float> v, DType dtype) {
  if (dtype == DType::kBF16) {
    for (float& x : v) x = ToFloat(ToBf16(x));
  }
  return v;
}
DeviceMemory Encode(const std::vector<float>& v, DType dtype) {
  if (dtype == DType::kF32) return DeviceMemory(v);
  std::vector<bf16> narrow;
  for (const float x : v) narrow.push_back(ToBf16(x));
  return DeviceMemory(narrow);
}
std::vector<float> DecodeBf16(const std::vector<bf16>& v) {
  std::vector<float> wide;
  for (const bf16 x : v) wide.push_back(ToFloat(x));
  return wide;
}

LineSizes Sizes(const LineRows& rows, int32_t kv_heads, int32_t group, int32_t dim, int32_t num_samples,
                const LineOptions& options, DType dtype = DType::kBF16) {
  return {.shape = {kv_heads * group, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))},
          .page_dtype = dtype,
          .num_samples = num_samples,
          .first_position = rows.first_position,
          .num_rows = rows.num_rows,
          .max_columns = options.max_columns,
          .max_offsets = options.max_offsets};
}

// ---- weights --------------------------------------------------------------------------------------------------------
TEST(LinesCuda, WeightsEqualReference) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU";
  Random random(31);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const auto& [dim, group, first, num_rows, samples] :
         std::vector<std::array<int32_t, 5>>{{128, 4, 0, 1100, 64},
                                             {128, 8, 37, 300, 128},
                                             {64, 2, 500, 700, 100},
                                             {64, 1, 63, 3, 3},
                                             {128, 4, 0, 1, 1},
                                             {40, 3, 10, 200, 20}}) {
      const int32_t kv_heads = 2;
      const LineRows rows{first, num_rows};
      Sequence s(random, dtype, dim, kv_heads, rows.num_keys());
      const int64_t stride = int64_t{kv_heads} * group * dim + 16;
      const std::vector<float> q = Rounded(random.Normals(static_cast<size_t>(num_rows * stride)), dtype);
      std::vector<int32_t> chosen, positions;
      for (int32_t i = 0; i < samples; ++i) chosen.push_back(static_cast<int32_t>(int64_t{i} * num_rows / samples));
      for (int32_t i = 0; i < num_rows; ++i) positions.push_back(first + i);
      const LineSizes sizes = Sizes(rows, kv_heads, group, dim, samples, {}, dtype);
      const DeviceMemory memory(LinePlanBytes(sizes), 0xff);
      const LinePlan plan = PlaceLinePlan(memory.as<void>(), sizes);
      const DeviceMemory device_q = Encode(q, dtype);
      LineJob job{.plan = plan,
                  .scratch = PlaceLineScratch(plan.scratch, sizes),
                  .batch = s.batch,
                  .q_dtype = dtype,
                  .q = device_q.as<void>(),
                  .q_row_stride = stride,
                  .num_heads = kv_heads,
                  .head = {0, 1}};
      std::copy(chosen.begin(), chosen.end(), job.sample);
      std::vector<float> host(static_cast<size_t>(kv_heads * samples * sizes.weight_stride()));
      ASSERT_TRUE(ref::LineWeights({}, {.shape = sizes.shape,
                                        .pool = s.host.view(),
                                        .q = q.data(),
                                        .q_row_stride = stride,
                                        .rows = {0, num_rows, positions, s.views},
                                        .samples = chosen,
                                        .weights = host.data(),
                                        .stride = sizes.weight_stride()})
                      .ok());
      for (const LineVariant variant : {LineVariant::kMma, LineVariant::kGeneric}) {
        const cudaError_t e = LineWeights(job, nullptr, variant);
        if (variant == LineVariant::kMma && (dim == 40 || dtype == DType::kF32)) {
          EXPECT_EQ(e, cudaErrorNotSupported);
          continue;
        }
        CHECK_CUDA(e);
        CHECK_CUDA(cudaDeviceSynchronize());
        const std::vector<float> device = Read(plan.weights, host.size());
        double error = 0, norm = 0;
        for (int32_t row = 0; row < kv_heads * samples; ++row) {
          const int32_t position = first + chosen[static_cast<size_t>(row % samples)];
          for (int32_t j = 0; j <= position; ++j) {
            const size_t at = static_cast<size_t>(row * sizes.weight_stride() + j);
            ASSERT_TRUE(std::isfinite(device[at])) << row << " " << j;
            error += std::pow(double{device[at]} - host[at], 2);
            norm += std::pow(double{host[at]}, 2);
          }
        }
        EXPECT_LE(std::sqrt(error / norm), 1e-5) << "dim " << dim << ", group " << group;
      }
    }
  }
}

// ---- choice and tiles -----------------------------------------------------------------------------------------------
// Multiples of 2^-12 whose sums are exact in f32, in any order.
void MakeExact(PlantedSample& s) {
  for (float& x : s.weights) {
    if (!std::isnan(x)) x = std::round(x * 4096) / 4096;
  }
}

struct ChoiceCase {
  LineRows rows;
  LineOptions options;
  Planted planted;
};

void ExpectSameChoice(Random& random, const ChoiceCase& c) {
  constexpr int32_t kHeads = 3;
  std::vector<int32_t> samples = SampleRows(c.rows.num_rows, static_cast<uint64_t>(random.Int(0, 1 << 20)));
  const auto num_samples = static_cast<int32_t>(samples.size());
  const LineSizes sizes = Sizes(c.rows, kHeads, 1, 64, num_samples, c.options);
  Sequence s(random, DType::kBF16, 64, kHeads, c.rows.num_keys());
  const DeviceMemory memory(LinePlanBytes(sizes), 0xff);
  const LinePlan plan = PlaceLinePlan(memory.as<void>(), sizes);
  LineJob job{.plan = plan,
              .scratch = PlaceLineScratch(plan.scratch, sizes),
              .options = c.options,
              .batch = s.batch,
              .num_heads = 2,
              .head = {0, 2}};  // head 1 stays as it is
  std::copy(samples.begin(), samples.end(), job.sample);
  std::vector<PlantedSample> planted;
  for (const int32_t h : {0, 2}) {
    planted.push_back(PlantSample(random, c.rows, samples, c.planted));
    MakeExact(planted.back());
    for (int32_t r = 0; r < num_samples; ++r) {
      CHECK_CUDA(cudaMemcpy(plan.weights + (int64_t{h} * num_samples + r) * sizes.weight_stride(),
                            planted.back().weights.data() + r * planted.back().stride,
                            static_cast<size_t>(c.rows.num_keys()) * sizeof(float), cudaMemcpyHostToDevice));
    }
  }
  CHECK_CUDA(LineChoiceAndTiles(job, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<LineResult> results = Read(plan.results, kHeads);
  uint32_t untouched = 0;
  std::memcpy(&untouched, &results[1].dense, 4);
  EXPECT_EQ(untouched, 0xffffffffu) << "a head that was not asked for was written";
  for (size_t i = 0; i < 2; ++i) {
    const int32_t h = i == 0 ? 0 : 2;
    const LineChoice want = SelectLines(c.options, c.rows, planted[i].view());
    const LineResult& got = results[static_cast<size_t>(h)];
    SCOPED_TRACE(::testing::Message() << "rows " << c.rows.first_position << "+" << c.rows.num_rows << ", head " << h);
    EXPECT_EQ(got.dense, want.dense);
    EXPECT_EQ(got.rounds, want.rounds);
    EXPECT_FLOAT_EQ(got.total, static_cast<float>(want.total));
    EXPECT_NEAR(got.uncovered, want.uncovered, 1e-6);
    ASSERT_EQ(got.num_columns, static_cast<int32_t>(want.columns.size()));
    ASSERT_EQ(got.num_offsets, static_cast<int32_t>(want.offsets.size()));
    const LineVisibility v = plan.Visibility(h);
    const std::vector<int32_t> columns = Read(v.columns, static_cast<size_t>(64 * v.column_words));
    EXPECT_TRUE(std::equal(want.columns.begin(), want.columns.end(), columns.begin()));
    EXPECT_TRUE(std::all_of(columns.begin() + got.num_columns, columns.end(), [](int32_t x) { return x == 0; }));
    const std::vector<int32_t> offsets =
        Read(plan.offsets + int64_t{h} * sizes.max_offsets, static_cast<size_t>(sizes.max_offsets));
    EXPECT_TRUE(std::equal(want.offsets.begin(), want.offsets.end(), offsets.begin()));
    std::vector<uint64_t> tiles(static_cast<size_t>(v.num_row_tiles() * v.tile_words));
    std::vector<uint64_t> masks(static_cast<size_t>(v.num_row_tiles() * v.column_words));
    LinesToTiles(
        {c.rows, want.columns, want.offsets, want.dense, v.tile_words, v.column_words, tiles.data(), masks.data()});
    EXPECT_EQ(Read(v.tiles, tiles.size()), tiles);
    EXPECT_EQ(Read(v.column_masks, masks.size()), masks);
    // The gathered pages: the columns' K and V, zeros behind the last one.
    const int64_t half = int64_t{64} * 64;
    const std::vector<bf16> pages =
        Read(static_cast<const bf16*>(v.column_pages), static_cast<size_t>((got.num_columns + 63) / 64 * 2 * half));
    for (size_t k = 0; k < pages.size() / (2 * half) * 64; ++k) {
      for (int32_t d = 0; d < 64; d += 7) {
        const TestStream& stream = s.streams[static_cast<size_t>(h)];
        const bool has = k < want.columns.size();
        const size_t from = has ? static_cast<size_t>(want.columns[k]) * 64 + static_cast<size_t>(d) : 0;
        const size_t at = k / 64 * 2 * half + k % 64 * 64 + static_cast<size_t>(d);
        ASSERT_EQ(ToFloat(pages[at]), has ? ToFloat(ToBf16(stream.k[from])) : 0.0f) << "K of column " << k;
        ASSERT_EQ(ToFloat(pages[at + half]), has ? ToFloat(ToBf16(stream.v[from])) : 0.0f) << "V of column " << k;
      }
    }
  }
}

TEST(LinesCuda, ChoiceAndTilesAreTheHosts) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU";
  Random random(32);
  const Planted few{.columns = 20, .slashes = 8, .tail = 0.02f}, heavy_tail{.columns = 40, .slashes = 12, .tail = 0.3f};
  for (const float alpha : {0.8f, 0.955f, 0.995f}) {
    for (const LineRows rows : {LineRows{0, 1}, LineRows{0, 200}, LineRows{333, 70}, LineRows{0, 3000}}) {
      ExpectSameChoice(random, {rows, {.alpha = alpha}, few});
    }
    ExpectSameChoice(random, {{1000, 2000}, {.alpha = alpha, .max_columns = 300, .max_offsets = 100}, heavy_tail});
  }
  // More lines than a round weighs: the radix select.
  ExpectSameChoice(random, {{0, 9000}, {.alpha = 0.9f}, heavy_tail});
  ExpectSameChoice(random, {{5000, 4500}, {.alpha = 0.99f}, heavy_tail});
  ExpectSameChoice(random, {{0, 20000}, {.alpha = 0.98f}, {.columns = 600, .slashes = 20, .tail = 0.02f}});
  ExpectSameChoice(random, {{0, 600}, {.alpha = 1.0f}, few});
  ExpectSameChoice(random, {{0, 600}, {.alpha = 1.0f, .max_rounds = 1}, few});
  ExpectSameChoice(random, {{0, 9000}, {.forced_offsets = 100, .top_columns = 1000, .top_offsets = 6096}, heavy_tail});
  ExpectSameChoice(random, {{100, 700}, {.forced_offsets = 100, .top_columns = 50, .top_offsets = 200}, few});
}

// ---- attention ------------------------------------------------------------------------------------------------------
struct Lines {
  std::vector<int32_t> columns;
  std::vector<uint64_t> tiles, masks;
};

// A plan made by the host, column pages and all; what no mask names is large.
class HostPlan {
 public:
  HostPlan(Random& random, const Sequence& s, const LineSizes& sizes, bool dense) : sizes_(sizes) {
    const LineRows rows{sizes.first_position, sizes.num_rows};
    for (int32_t h = 0; h < sizes.shape.num_kv_heads; ++h) {
      std::set<int32_t> columns, offsets = {0};
      for (int32_t k = random.Int(0, std::min(sizes.max_columns, 200)); k > 0; --k)
        columns.insert(random.Int(0, rows.num_keys() - 1));
      for (int32_t k = random.Int(0, 5); k > 0; --k) offsets.insert(random.Int(0, rows.num_keys() - 1));
      Lines& l = lines_.emplace_back();
      l.columns.assign(columns.begin(), columns.end());
      const std::vector<int32_t> o(offsets.begin(), offsets.end());
      l.tiles.resize(static_cast<size_t>(sizes.num_row_tiles() * sizes.tile_words()));
      l.masks.resize(static_cast<size_t>(sizes.num_row_tiles() * sizes.column_words()));
      LinesToTiles(
          {rows, l.columns, o, dense, sizes.tile_words(), sizes.column_words(), l.tiles.data(), l.masks.data()});
      l.columns.resize(static_cast<size_t>(64 * sizes.column_words()));
      tiles_.insert(tiles_.end(), l.tiles.begin(), l.tiles.end());
      masks_.insert(masks_.end(), l.masks.begin(), l.masks.end());
      columns_.insert(columns_.end(), l.columns.begin(), l.columns.end());
      const TestStream& stream = s.streams[static_cast<size_t>(h)];
      for (int32_t page = 0; page < sizes.column_words(); ++page) {
        for (const std::vector<float>* from : {&stream.k, &stream.v}) {
          for (size_t slot = 0; slot < 64; ++slot) {
            const size_t i = static_cast<size_t>(page) * 64 + slot;
            bool named = false;
            for (int32_t t = 0; t < sizes.num_row_tiles(); ++t)
              named |= (l.masks[static_cast<size_t>(t * sizes.column_words() + page)] >> slot & 1) != 0;
            for (int32_t d = 0; d < sizes.shape.head_dim; ++d) {
              pages_.push_back(
                  ToBf16(named ? (*from)[static_cast<size_t>(l.columns[i] * sizes.shape.head_dim + d)] : 77.0f));
            }
          }
        }
      }
    }
    for (int32_t h = 0; h < sizes.shape.num_kv_heads; ++h) {
      const Lines& l = lines_[static_cast<size_t>(h)];
      host_.push_back({.first_position = sizes.first_position,
                       .num_rows = sizes.num_rows,
                       .tile_words = sizes.tile_words(),
                       .column_words = sizes.column_words(),
                       .tiles = l.tiles.data(),
                       .column_masks = l.masks.data(),
                       .columns = l.columns.data()});
    }
    memory_.emplace_back(tiles_);
    memory_.emplace_back(masks_);
    memory_.emplace_back(columns_);
    memory_.emplace_back(pages_);
  }
  HostPlan(const HostPlan&) = delete;

  PrefillLines device() const {
    return {memory_[0].as<uint64_t>(), memory_[1].as<uint64_t>(), memory_[2].as<int32_t>(), memory_[3].as<void>(),
            sizes_.num_row_tiles(),    sizes_.tile_words(),       sizes_.column_words()};
  }
  const LineVisibility* host(int32_t h) const { return &host_[static_cast<size_t>(h)]; }

 private:
  LineSizes sizes_;
  std::vector<Lines> lines_;
  std::vector<LineVisibility> host_;
  std::vector<uint64_t> tiles_, masks_;
  std::vector<int32_t> columns_;
  std::vector<bf16> pages_;
  std::vector<DeviceMemory> memory_;
};

bool PageIsSeen(const LineVisibility& v, int32_t page) {
  for (int32_t t = 0; t < v.num_row_tiles(); ++t) {
    if (v.tiles[t * v.tile_words + page / 64] >> (page % 64) & 1) return true;
    for (int32_t i = 0; i < 64 * v.column_words; ++i) {
      if ((v.column_masks[t * v.column_words + i / 64] >> (i % 64) & 1) && v.columns[i] / kPageTokens == page)
        return true;
    }
  }
  return false;
}

struct Attended {
  std::vector<float> out, lse;
};

Attended Attend(const Sequence& s, const AttentionShape& shape, const DeviceMemory& q,
                const std::vector<int32_t>& positions, const HeadRules& rules, const PrefillLines& lines,
                Variant variant, int32_t last_rows = 0) {
  const auto rows = static_cast<int32_t>(positions.size());
  const size_t outs = static_cast<size_t>(rows) * shape.num_qo_heads * shape.head_dim;
  const DeviceMemory out(outs * 2, 0xff), lse(static_cast<size_t>(rows) * shape.num_qo_heads * 4, 0xff);
  const DeviceMemory workspace(PrefillWorkspaceBytes(), 0), device_positions(positions);
  const DeviceMemory row_begin(std::vector<int32_t>{0, rows});
  const PrefillArgs args{.heads = {shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.sm_scale},
                         .rules = rules,
                         .batch = s.batch,
                         .row_begin = row_begin.as<int32_t>(),
                         .positions = device_positions.as<int32_t>(),
                         .num_rows = rows,
                         .max_kv_len = positions.back() + 1,
                         .q = q.as<void>(),
                         .q_row_stride = int64_t{shape.num_qo_heads} * shape.head_dim,
                         .out = out.as<void>(),
                         .lse = lse.as<float>(),
                         .workspace = workspace.as<void>(),
                         .last_rows = last_rows,
                         .lines = lines};
  for (int i = 0; i < 2; ++i) CHECK_CUDA(PrefillAttention(args, nullptr, variant));  // twice: the workspace is clean
  CHECK_CUDA(cudaDeviceSynchronize());
  return {DecodeBf16(Read(out.as<bf16>(), outs)),
          Read(lse.as<float>(), static_cast<size_t>(rows) * shape.num_qo_heads)};
}

bool IsHopper() {
  int major = 0, device = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major == 9;
}

std::vector<Variant> LineVariants() {
  return IsHopper() ? std::vector<Variant>{Variant::kGeneric, Variant::kSm90} : std::vector<Variant>{Variant::kGeneric};
}

struct AttentionCase {
  LineRows rows;
  int32_t dim, kv_heads, group, max_columns;
};

TEST(LinesCuda, AttentionEqualsReference) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU";
  Random random(33);
  for (const AttentionCase& c : {AttentionCase{{0, 300}, 128, 2, 4, 256}, AttentionCase{{0, 1}, 128, 1, 2, 64},
                                 AttentionCase{{37, 29}, 64, 2, 2, 64}, AttentionCase{{1000, 200}, 128, 2, 3, 300},
                                 AttentionCase{{4090, 140}, 64, 1, 1, 512}, AttentionCase{{0, 700}, 64, 2, 8, 192}}) {
    Sequence s(random, DType::kBF16, c.dim, c.kv_heads, c.rows.num_keys());
    const LineSizes sizes = Sizes(c.rows, c.kv_heads, c.group, c.dim, 1, {.max_columns = c.max_columns});
    std::vector<int32_t> positions;
    for (int32_t i = 0; i < c.rows.num_rows; ++i) positions.push_back(c.rows.first_position + i);
    const std::vector<float> q =
        Rounded(random.Normals(static_cast<size_t>(c.rows.num_rows) * sizes.shape.num_qo_heads * c.dim), DType::kBF16);
    const DeviceMemory device_q = Encode(q, DType::kBF16);
    for (const bool mixed : {false, true}) {
      Sequence s(random, DType::kBF16, c.dim, c.kv_heads, c.rows.num_keys());
      const HostPlan plan(random, s, sizes, false);
      HeadRules rules;
      std::vector<HeadStreamView> views = s.views;
      for (int32_t h = 0; h < c.kv_heads; ++h) {
        HeadVisibility& v = views[static_cast<size_t>(h)].visibility;
        if (mixed && h % 2 == 0) {
          v = {.rule = VisibilityRule::kBand, .num_sinks = 9, .window = 70};
        } else {
          v = {.rule = VisibilityRule::kLines, .lines = plan.host(h)};
          for (int32_t page = 0; page < s.page_stride; ++page) {
            if (!PageIsSeen(*v.lines, page)) s.Poison(h, page);
          }
        }
        rules.head[h] = {v.rule, v.num_sinks, v.window};
      }
      const PrefillSequence sequence{0, c.rows.num_rows, positions, views};
      Attended want{std::vector<float>(q.size()),
                    std::vector<float>(static_cast<size_t>(c.rows.num_rows) * sizes.shape.num_qo_heads)};
      ASSERT_TRUE(ref::PrefillAttention({}, {.shape = sizes.shape,
                                             .pool = s.host.view(),
                                             .q = q.data(),
                                             .q_row_stride = int64_t{sizes.shape.num_qo_heads} * c.dim,
                                             .out = want.out.data(),
                                             .lse = want.lse.data(),
                                             .sequences = {&sequence, 1}})
                      .ok());
      for (const Variant variant : LineVariants()) {
        SCOPED_TRACE(::testing::Message() << "rows " << c.rows.first_position << "+" << c.rows.num_rows << ", dim "
                                          << c.dim << ", variant " << static_cast<int>(variant) << ", mixed " << mixed);
        const Attended got = Attend(s, sizes.shape, device_q, positions, rules, plan.device(), variant);
        ExpectClose(got.out, want.out, DType::kBF16, "out");
        ExpectClose(got.lse, want.lse, DType::kBF16, "lse");
        if (c.rows.num_rows < 100) continue;
        const Attended last = Attend(s, sizes.shape, device_q, positions, rules, plan.device(), variant, 50);
        const size_t row = static_cast<size_t>(sizes.shape.num_qo_heads) * c.dim;
        const size_t first = static_cast<size_t>(c.rows.num_rows - 50) * row;
        EXPECT_TRUE(BitwiseEqual(std::span(last.out).subspan(first), std::span(got.out).subspan(first)));
        EXPECT_TRUE(std::isnan(last.out[first - 1])) << "a row in front was written";
      }
    }
  }
}

// Limit: every tile set is dense causal attention.
TEST(LinesCuda, AllTilesAreDense) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU";
  Random random(34);
  for (const AttentionCase& c : {AttentionCase{{0, 1000}, 128, 2, 4, 64}, AttentionCase{{333, 500}, 64, 2, 2, 64}}) {
    Sequence s(random, DType::kBF16, c.dim, c.kv_heads, c.rows.num_keys());
    const LineSizes sizes = Sizes(c.rows, c.kv_heads, c.group, c.dim, 1, {.max_columns = c.max_columns});
    const HostPlan plan(random, s, sizes, true);
    std::vector<int32_t> positions;
    for (int32_t i = 0; i < c.rows.num_rows; ++i) positions.push_back(c.rows.first_position + i);
    const DeviceMemory q =
        Encode(random.Normals(static_cast<size_t>(c.rows.num_rows) * sizes.shape.num_qo_heads * c.dim), DType::kBF16);
    HeadRules rules;
    for (int32_t h = 0; h < c.kv_heads; ++h) rules.head[h].rule = VisibilityRule::kLines;
    for (const Variant variant : LineVariants()) {
      const Attended dense = Attend(s, sizes.shape, q, positions, {}, {}, variant);
      const Attended lines = Attend(s, sizes.shape, q, positions, rules, plan.device(), variant);
      EXPECT_TRUE(BitwiseEqual(lines.out, dense.out)) << static_cast<int>(variant);
      EXPECT_TRUE(BitwiseEqual(lines.lse, dense.lse)) << static_cast<int>(variant);
    }
  }
}

}  // namespace
}  // namespace spl::kernels::cuda
