// libsplice_xgrammar.so: grammars compiled and matched by xgrammar. Its exceptions and its headers stay in here.
#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/common/plugin.h"
#include "services/base/status.h"
#include "services/grammar/grammar_plugin.h"
#include "services/grammar/json_patterns.h"
#include "services/grammar/string_bounds.h"
#include "services/grammar/string_runs.h"
#include "services/grammar/token_grammar.h"
#include "services/grammar/work_budget.h"

namespace spl::grammar {
namespace {

// Set while a thread compiles: where the first warning goes.
thread_local std::string* compile_warning = nullptr;

}  // namespace
}  // namespace spl::grammar

// XGRAMMAR_LOG_CUSTOMIZE: errors are exceptions with the message alone. Warnings of a compile are about parts of a
// schema that it does not keep to; those of a matcher are about tokens that Accept refuses.
namespace xgrammar {
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int, const std::string& message) {
  std::string* const warning = spl::grammar::compile_warning;
  if (warning != nullptr && warning->empty()) *warning = message;
}
}  // namespace xgrammar

namespace spl::grammar {
namespace {

// White space between two parts of a JSON text at most: a line end and the indentation of what is deeply nested.
constexpr int kMaxJsonSpace = 32;

// The bounds of a compile. For 128K tokens most schemas take 0.1 s, and every character of a maxLength 0.05 s more.
constexpr WorkLimits kCompileLimits = {.time = std::chrono::seconds(10), .bytes = size_t{512} << 20};

// The bounds of a token, for its mask and its acceptance each: other answers of the batch wait for it. An answer has
// some time to go beyond the first bound, and none to go beyond the second.
constexpr std::chrono::milliseconds kTokenTime{5};
constexpr std::chrono::milliseconds kSlackTime{250};
constexpr std::chrono::milliseconds kTokenTimeMax{50};
constexpr size_t kTokenBytes = size_t{64} << 20;

// Runs `work` within the limits. ResourceExhausted names the one that it went beyond; InvalidArgument is xgrammar's
// error. `spent`, if given, gets the time taken, 0 where that is at most `exact_above`.
template <class Work>
absl::Status RunBounded(const WorkLimits& limits, const Work& work, std::chrono::nanoseconds* spent = nullptr,
                        std::chrono::nanoseconds exact_above = {}) {
  WorkBudget budget(limits);
  try {
    work();
    budget.End();
    if (spent != nullptr) *spent = budget.Spent(exact_above);
    return absl::OkStatus();
  } catch (const WorkExceeded& e) {
    budget.End();
    return absl::ResourceExhaustedError(e.what());
  } catch (const std::bad_alloc&) {
    budget.End();
    return absl::ResourceExhaustedError("memory");
  } catch (const std::exception& e) {
    budget.End();
    return absl::InvalidArgumentError(e.what());
  }
}

class XBytes final : public ByteMatcher {
 public:
  explicit XBytes(xgrammar::GrammarMatcher& matcher) : matcher_(matcher) {}
  bool Accept(std::string_view bytes) override { return matcher_.AcceptString(std::string(bytes)); }
  void Undo(int num_accepts) override {
    if (num_accepts > 0) matcher_.Rollback(num_accepts);
  }

 private:
  xgrammar::GrammarMatcher& matcher_;
};

// A grammar as it is followed.
struct Compiled {
  xgrammar::CompiledGrammar grammar;
  // Set if `grammar` leaves out the bounds of strings: the same grammar with them, for a vocabulary without texts.
  std::optional<xgrammar::CompiledGrammar> exact = std::nullopt;
  StringBounds bounds = {};  // its runs are there in any case
};

class XMatcher final : public TokenMatcher {
 public:
  XMatcher(std::shared_ptr<const Compiled> compiled, int32_t width) : compiled_(std::move(compiled)), width_(width) {
    (void)Bounded([&] {
      matcher_.emplace(compiled_->grammar);
      if (compiled_->exact.has_value()) exact_.emplace(*compiled_->exact);
    });
  }

  absl::Status FillMask(std::span<uint32_t> mask) override {
    std::array<int64_t, 1> shape = {static_cast<int64_t>(mask.size())};
    DLTensor tensor = {};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = shape.data();
    return Bounded([&] {
      // False: every token may come, and the mask need not have been written.
      if (!matcher_->FillNextTokenBitmask(&tensor)) std::memset(mask.data(), 0xff, mask.size_bytes());
      ClearSurrogates(*compiled_->bounds.runs, open_, mask);
      if (!exact_.has_value()) return;
      XBytes wide(*matcher_), exact(*exact_);
      compiled_->bounds.Apply(wide, exact, open_, mask);
    });
  }

  absl::Status Accept(int32_t token) override {
    if (token < 0 || token >= width_) return InvalidArgument("token {} is outside the vocabulary of {}", token, width_);
    bool accepted = false;
    SPLICE_RETURN_IF_ERROR(Bounded([&] { accepted = !matcher_->IsTerminated() && AcceptBoth(token); }));
    return accepted ? absl::OkStatus() : InvalidArgument("token {} does not fit the grammar", token);
  }

  bool ended() const override { return error_.ok() && matcher_->IsTerminated(); }
  bool complete() const override {
    return error_.ok() && matcher_->IsCompleted() && (!exact_.has_value() || exact_->IsCompleted());
  }

 private:
  bool AcceptBoth(int32_t token) {
    if (!matcher_->AcceptToken(token)) return false;
    const TokenRuns& runs = *compiled_->bounds.runs;
    const std::string bytes = token < runs.size() && !matcher_->IsTerminated() ? runs.bytes(token) : "";
    if (exact_.has_value() && !(bytes.empty() ? exact_->AcceptToken(token) : exact_->AcceptString(bytes))) {
      matcher_->Rollback(1);
      return false;
    }
    open_.Add(bytes);
    return true;
  }

  // The matcher is of no use after an error of `work`: it may be half changed.
  template <class Work>
  absl::Status Bounded(const Work& work) {
    if (!error_.ok()) return error_;
    const std::chrono::nanoseconds limit = std::min<std::chrono::nanoseconds>(kTokenTimeMax, kTokenTime + slack_);
    std::chrono::nanoseconds spent{};
    error_ = RunBounded({limit, kTokenBytes}, work, &spent, kTokenTime);
    if (absl::IsResourceExhausted(error_))
      error_ =
          Errorf(absl::StatusCode::kResourceExhausted,
                 "the grammar needs more {} at a token than there is ({} ms, {} ms in all beyond {}): make it simpler",
                 MessageOf(error_), kTokenTimeMax.count(), kSlackTime.count(), kTokenTime.count());
    if (absl::IsInvalidArgument(error_)) error_ = absl::InternalError(error_.message());
    if (spent > kTokenTime) slack_ -= std::min<std::chrono::nanoseconds>(slack_, spent - kTokenTime);
    return error_;
  }

  const std::shared_ptr<const Compiled> compiled_;
  std::optional<xgrammar::GrammarMatcher> matcher_;  // there unless error_ says otherwise
  std::optional<xgrammar::GrammarMatcher> exact_;    // of Compiled::exact
  OpenCharacter open_;
  const int32_t width_;
  std::chrono::nanoseconds slack_ = kSlackTime;
  absl::Status error_;
};

class XGrammar final : public TokenGrammar {
 public:
  XGrammar(Compiled compiled, int32_t width)
      : compiled_(std::make_shared<const Compiled>(std::move(compiled))), width_(width) {}
  std::unique_ptr<TokenMatcher> NewMatcher() const override { return std::make_unique<XMatcher>(compiled_, width_); }
  int32_t width() const override { return width_; }
  size_t num_bytes() const override {
    return compiled_->grammar.MemorySizeBytes() +
           (compiled_->exact.has_value() ? compiled_->exact->MemorySizeBytes() : 0);
  }

 private:
  const std::shared_ptr<const Compiled> compiled_;
  const int32_t width_;
};

// The bytes of a string as an EBNF literal.
std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        out += c;
    }
  }
  return out + "\"";
}

std::string ChoiceGrammar(const std::string& choices) {
  std::string rule = "root ::= ";
  bool first = true;
  for (const auto& choice : nlohmann::json::parse(choices)) {
    rule += (first ? "" : " | ") + Quoted(choice.get<std::string>());
    first = false;
  }
  return rule;
}

// The vocabulary as xgrammar gets it. Special tokens have bytes that no text has: with them the parts of a structural
// tag that are tokens can be told from each other. `texts`: those of the other tokens; without, no mask has them.
std::vector<std::string> Texts(const std::vector<std::string>& tokens, bool texts) {
  std::vector<std::string> out(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    out[id] = tokens[id].empty() ? "\xff" + std::to_string(id) : texts ? tokens[id] : "";
  }
  return out;
}

// Whether a structural tag has a part that is a token, or tokens.
bool NamesTokens(const nlohmann::json& part) {
  if (!part.is_structured()) return false;
  if (part.is_object() && part.contains("json_schema")) return false;
  if (part.is_object() && part.contains("type") && part["type"].is_string() &&
      part["type"].get<std::string>().find("token") != std::string::npos)
    return true;
  return std::any_of(part.begin(), part.end(), [](const auto& inner) { return NamesTokens(inner); });
}

bool NamesTokens(const GrammarSpec& spec) {
  return spec.kind == GrammarKind::kStructuralTag && NamesTokens(nlohmann::json::parse(spec.text, nullptr, false));
}

class XCompiler final : public GrammarCompiler {
 public:
  // One thread, the caller's, and no cache: GrammarCache has one.
  explicit XCompiler(const Vocabulary& vocabulary)
      : vocabulary_(vocabulary), plain_(Info(vocabulary.tokens), 1, false) {}

  absl::StatusOr<std::shared_ptr<const TokenGrammar>> Compile(const GrammarSpec& asked) const override {
    const GrammarSpec spec = WithAsciiPatterns(asked);
    const std::optional<UnboundedStrings> unbounded = WithoutStringBounds(spec);
    xgrammar::GrammarCompiler& compiler = CompilerFor(spec);
    const std::shared_ptr<const TokenRuns> runs = Runs();
    std::string warning;
    std::optional<Compiled> compiled;
    compile_warning = &warning;
    const absl::Status status = RunBounded(kCompileLimits, [&] {
      CheckPatternsOrThrow(spec);
      compiled =
          Compiled{CompileOrThrow(unbounded.has_value() ? unbounded->spec : WithBoundsAsPatterns(spec), compiler)};
      compiled->bounds = {runs, unbounded.has_value() ? unbounded->shortest : 0,
                          unbounded.has_value() && unbounded->overlaps};
      if (unbounded.has_value()) compiled->exact = CompileOrThrow(spec, *textless_);
    });
    compile_warning = nullptr;
    if (absl::IsResourceExhausted(status))
      return InvalidArgument("takes more {} to compile than there is ({} s, {} MiB): make it smaller, or repeat less",
                             MessageOf(status), kCompileLimits.time / std::chrono::seconds(1),
                             kCompileLimits.bytes >> 20);
    if (!status.ok()) return status;
    if (!warning.empty()) return absl::InvalidArgumentError(warning);
    const auto grammar = std::make_shared<const XGrammar>(*std::move(compiled), vocabulary_.width);
    SPLICE_RETURN_IF_ERROR(CheckBegins(*grammar));
    return grammar;
  }

 private:
  static absl::Status CheckBegins(const TokenGrammar& grammar) {
    std::vector<uint32_t> first(MaskWords(grammar.width()));
    if (const absl::Status filled = grammar.NewMatcher()->FillMask(first); !filled.ok())
      return absl::InvalidArgumentError(filled.message());
    if (std::all_of(first.begin(), first.end(), [](uint32_t word) { return word == 0; }))
      return absl::InvalidArgumentError("no text fits the grammar");
    return absl::OkStatus();
  }

  // xgrammar keeps what JSON has to escape out of a pattern, and does not where nothing else fits it.
  static void CheckPatternsOrThrow(const GrammarSpec& spec) {
    for (const std::string& pattern : PatternsIn(spec)) {
      const nlohmann::json schema = {{"type", "string"}, {"pattern", pattern}};
      const std::string rules = xgrammar::Grammar::FromJSONSchema(schema.dump()).ToString();
      if (rules.find("json_string=true") == std::string::npos)
        throw std::runtime_error("the pattern " + pattern +
                                 " is not supported: all that fits it has quotes, backslashes or control characters, "
                                 "or it has characters beyond U+FFFF");
    }
  }

  xgrammar::TokenizerInfo Info(const std::vector<std::string>& texts) const {
    return {texts, xgrammar::VocabType::RAW, vocabulary_.width, vocabulary_.end_ids};
  }

  // Made when it is needed first: few grammars name tokens.
  xgrammar::GrammarCompiler& CompilerFor(const GrammarSpec& spec) const {
    if (!NamesTokens(spec)) return plain_;
    const std::lock_guard lock(mutex_);
    if (!with_tokens_.has_value()) with_tokens_.emplace(Info(Texts(vocabulary_.tokens, true)), 1, false);
    return *with_tokens_;
  }

  // Also makes textless_.
  std::shared_ptr<const TokenRuns> Runs() const {
    const std::lock_guard lock(mutex_);
    if (runs_ == nullptr) {
      runs_ = std::make_shared<const TokenRuns>(vocabulary_);
      textless_.emplace(Info(Texts(vocabulary_.tokens, false)), 1, false);
    }
    return runs_;
  }

  static xgrammar::CompiledGrammar CompileOrThrow(const GrammarSpec& spec, xgrammar::GrammarCompiler& compiler) {
    const auto schema = [&](const std::string& text) {
      return compiler.CompileJSONSchema(text, true, std::nullopt, std::nullopt, spec.strict, kMaxJsonSpace);
    };
    switch (spec.kind) {
      case GrammarKind::kJsonObject:
        return schema(R"({"type": "object"})");
      case GrammarKind::kJsonSchema:
        return schema(spec.text);
      case GrammarKind::kRegex:
        return compiler.CompileRegex(spec.text);
      case GrammarKind::kChoice:
        return compiler.CompileGrammar(ChoiceGrammar(spec.text));
      case GrammarKind::kGrammar:
        return compiler.CompileGrammar(spec.text);
      case GrammarKind::kStructuralTag:
        return compiler.CompileStructuralTag(spec.text);
    }
    throw std::runtime_error("unknown kind of grammar");
  }

  const Vocabulary vocabulary_;
  // Thread-safe without their caches: each call works on its own grammar.
  mutable xgrammar::GrammarCompiler plain_;
  mutable std::mutex mutex_;                                      // guards the making of those below
  mutable std::optional<xgrammar::GrammarCompiler> with_tokens_;  // for NamesTokens
  mutable std::optional<xgrammar::GrammarCompiler> textless_;     // for Compiled::exact
  mutable std::shared_ptr<const TokenRuns> runs_;
};

}  // namespace
}  // namespace spl::grammar

extern "C" __attribute__((visibility("default"))) spl::grammar::GrammarCompiler* splice_xgrammar_make(
    const char* build, const spl::grammar::Vocabulary& vocabulary, absl::Status& error) {
  if (std::strcmp(build, spl::kernels::PluginBuild()) != 0) {
    error = absl::FailedPreconditionError("libsplice_xgrammar.so is of another build than the program");
    return nullptr;
  }
  try {
    return new spl::grammar::XCompiler(vocabulary);
  } catch (const std::exception& e) {
    error = absl::InternalError(e.what());
    return nullptr;
  }
}
