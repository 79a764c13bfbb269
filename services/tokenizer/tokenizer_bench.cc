// Speed of encoding and decoding, in bytes of text per second on one thread. Run in the source root.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "services/tokenizer/chat_template.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {
namespace {

constexpr char kModel[] = "models/splice-tiny";

// Words with falling frequencies, as in prose, so that caches and look-ups see a realistic mix.
std::string English(size_t num_bytes) {
  static const char* const kWords[] = {
      "the",        "of",          "and",       "to",       "a",         "in",       "that",       "is",
      "was",        "he",          "for",       "it",       "with",      "as",       "his",        "on",
      "be",         "at",          "by",        "had",      "not",       "are",      "but",        "from",
      "or",         "have",        "which",     "question", "answer",    "document", "system",     "because",
      "government", "through",     "different", "between",  "important", "children", "university", "information",
      "knowledge",  "temperature", "society",   "London's", "1984",      "don't",    "memory",     "throughput",
      "incredible", "sequence",    "attention", "Berlin",   "quarterly", "42"};
  std::string text;
  uint64_t state = 1;
  while (text.size() < num_bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double uniform = static_cast<double>(state >> 33) / static_cast<double>(1u << 31);
    text += kWords[static_cast<size_t>(uniform * uniform * std::size(kWords))];
    text += (state >> 20) % 12 == 0 ? ". " : (state >> 24) % 40 == 0 ? ",\n" : " ";
  }
  return text;
}

std::unique_ptr<Tokenizer> Load(benchmark::State& state) {
  auto loaded = Tokenizer::Load(kModel);
  if (loaded.ok()) return *std::move(loaded);
  state.SkipWithError(std::string(loaded.status().message().data(), loaded.status().message().size()).c_str());
  return nullptr;
}

void BM_Load(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(Tokenizer::Load(kModel));
}
BENCHMARK(BM_Load)->Unit(benchmark::kMillisecond);

void BM_EncodeEnglish(benchmark::State& state) {
  const auto tokenizer = Load(state);
  if (tokenizer == nullptr) return;
  const std::string text = English(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer->Encode(text, {}));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
}
BENCHMARK(BM_EncodeEnglish)->Arg(200)->Arg(1 << 20);

// One piece that no pattern cuts, which measures the merge heap.
void BM_EncodeOneLongWord(benchmark::State& state) {
  const auto tokenizer = Load(state);
  if (tokenizer == nullptr) return;
  std::string text = English(state.range(0));
  std::erase_if(text, [](char c) { return c < 'a' || c > 'z'; });
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer->Encode(text, {}));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
}
BENCHMARK(BM_EncodeOneLongWord)->Arg(1 << 20);

void BM_Decode(benchmark::State& state) {
  const auto tokenizer = Load(state);
  if (tokenizer == nullptr) return;
  const std::string text = English(1 << 20);
  const std::vector<TokenId> ids = tokenizer->Encode(text, {}).value();
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer->Decode(ids, {}));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
}
BENCHMARK(BM_Decode);

// Time per token on the streaming path.
void BM_StreamDecode(benchmark::State& state) {
  const auto tokenizer = Load(state);
  if (tokenizer == nullptr) return;
  const std::vector<TokenId> ids = tokenizer->Encode(English(1 << 16), {}).value();
  for (auto _ : state) {
    StreamDecoder stream(*tokenizer, {});
    for (const TokenId id : ids) benchmark::DoNotOptimize(stream.Append(id));
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * ids.size()));
}
BENCHMARK(BM_StreamDecode);

void BM_RenderChat(benchmark::State& state) {
  const auto loaded = ChatTemplate::Load(kModel);
  if (!loaded.ok()) return state.SkipWithError("no chat template");
  const std::vector<ChatMessage> messages(20, {"user", English(500)});
  for (auto _ : state) benchmark::DoNotOptimize((*loaded)->Render(messages, {}));
}
BENCHMARK(BM_RenderChat);

}  // namespace
}  // namespace spl::tokenizer

BENCHMARK_MAIN();
