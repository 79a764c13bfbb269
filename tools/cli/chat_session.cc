#include "tools/cli/chat_session.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "services/base/ids.h"
#include "services/base/status.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr int64_t kTokensForARate = 8;
constexpr char kBlock[] = "\"\"\"";
constexpr char kHelp[] =
    "/help                this list\n"
    "/clear               forget the conversation\n"
    "/system TEXT         set the system message; without TEXT there is none\n"
    "/set NAME VALUE      temperature, top_p, top_k, min_p, repetition_penalty, seed, max_tokens, reuse, decode,\n"
    "                     namespace or an option of reuse; VALUE default is the model's or the server's own\n"
    "/set                 what is set\n"
    "/receipt             how the last answer was made\n"
    "/quit                end; so does Ctrl-D\n"
    "\"\"\"                  begins and ends a message of several lines\n"
    "Ctrl-C               stops an answer; twice at the prompt it ends the program\n";

std::string Trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

// True for "/word", alone or before a space. "/etc/hosts" is text.
bool IsCommand(const std::string& line) {
  if (line.size() < 2 || line[0] != '/') return false;
  const std::string word = line.substr(1, line.find_first_of(" \t\n") - 1);
  return !word.empty() && word.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos;
}

// The first word of `text`, which keeps the rest.
std::string TakeWord(std::string& text) {
  const size_t end = std::min(text.find_first_of(" \t\n"), text.size());
  const std::string word = text.substr(0, end);
  text = Trim(text.substr(end));
  return word;
}

// Calls generator.Stop when Ctrl-C comes while it lives.
class StopOnInterrupt {
 public:
  StopOnInterrupt(TextGenerator& generator, InterruptEvent& interrupt)
      : done_(::eventfd(0, EFD_CLOEXEC)), thread_([this, &generator, &interrupt] {
          pollfd both[] = {{done_, POLLIN, 0}, {interrupt.fd(), POLLIN, 0}};
          while (::poll(both, 2, -1) < 0 && errno == EINTR) {
          }
          if (both[0].revents != 0 || !interrupt.Take()) return;
          stopped_ = true;
          generator.Stop();
        }) {}
  ~StopOnInterrupt() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(done_, &one, sizeof one);
    thread_.join();
    ::close(done_);
  }
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

  bool stopped() const { return stopped_; }

 private:
  const int done_;
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

// Writes pieces of reasoning and of the answer; reasoning is dim, with an empty line behind it.
class AnswerWriter {
 public:
  AnswerWriter(Style style, bool terminal) : style_(style), terminal_(terminal) {}

  void Write(const std::string& piece, bool reasoning) {
    if (reasoning != reasoning_) {
      if (!reasoning) Put("\n\n");
      reasoning_ = reasoning;
    }
    const std::string shown = terminal_ ? WithoutControls(piece) : piece;
    Put(reasoning ? style_.Dim(shown) : shown);
    std::fflush(stdout);
  }

 private:
  static void Put(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

  const Style style_;
  const bool terminal_;
  bool reasoning_ = false;
};

}  // namespace

ChatSession::ChatSession(TextGenerator& generator, LineReader& reader, InterruptEvent& interrupt, ChatSettings settings,
                         Options options)
    : generator_(generator),
      reader_(reader),
      interrupt_(interrupt),
      settings_(std::move(settings)),
      options_(std::move(options)) {
  Forget();
}

void ChatSession::Forget() {
  messages_ = json::array();
  SetSystem(options_.system);
  session_ = RandomId::Make().ToHex();
  receipt_ = nullptr;
}

void ChatSession::SetSystem(const std::string& text) {
  options_.system = text;
  if (!messages_.empty() && messages_.front()["role"] == "system") messages_.erase(0);
  if (!text.empty()) messages_.insert(messages_.begin(), json{{"role", "system"}, {"content", text}});
}

void ChatSession::Note(const std::string& text) const {
  if (options_.terminal) fmt::print(stderr, "{}\n", options_.err.Dim(text));
}

absl::StatusOr<ChatSession::Input> ChatSession::ReadBlock(std::string& message) {
  const auto closed = [&] { return message.ends_with(kBlock); };
  std::string line;
  while (!closed()) {
    switch (reader_.Read(". ", line)) {
      case LineReader::End::kLine:
        message += (message.empty() ? "" : "\n") + line;
        break;
      case LineReader::End::kInterrupted:
        return Input::kInterrupted;
      case LineReader::End::kInput:
        if (options_.terminal) return Input::kEnd;
        return InvalidArgument("the input ends inside a message that \"\"\" began");
    }
  }
  message = Trim(message.substr(0, message.size() - 3));
  return Input::kMessage;
}

absl::StatusOr<ChatSession::Input> ChatSession::ReadMessage(std::string& message) {
  std::string line;
  switch (reader_.Read("> ", line)) {
    case LineReader::End::kInterrupted:
      return Input::kInterrupted;
    case LineReader::End::kInput:
      return Input::kEnd;
    case LineReader::End::kLine:
      break;
  }
  message = Trim(line);
  if (!message.starts_with(kBlock)) return Input::kMessage;
  message.erase(0, 3);
  return ReadBlock(message);
}

absl::Status ChatSession::Run() {
  std::string message;
  while (true) {
    if (options_.terminal) fmt::print("\n");
    SPLICE_ASSIGN_OR_RETURN(const Input input, ReadMessage(message));
    if (input == Input::kEnd) return absl::OkStatus();
    if (input == Input::kInterrupted) {
      if (!options_.terminal) return absl::CancelledError("interrupted");
      if (interrupted_once_) return absl::OkStatus();
      interrupted_once_ = true;
      Note("Ctrl-C once more ends, and so does Ctrl-D");
      continue;
    }
    interrupted_once_ = false;
    if (message.empty()) continue;
    reader_.AddToHistory(message);
    if (options_.on_typed) options_.on_typed(message);
    if (IsCommand(message)) {
      SPLICE_ASSIGN_OR_RETURN(const bool goes_on, RunCommand(message));
      if (!goes_on) return absl::OkStatus();
    } else {
      SPLICE_RETURN_IF_ERROR(Answer(message));
    }
  }
}

absl::StatusOr<bool> ChatSession::RunCommand(const std::string& line) {
  std::string rest = line.substr(1);
  const std::string word = TakeWord(rest);
  absl::Status status;
  if (word == "quit" || word == "exit") return false;
  if (word == "help") {
    fmt::print("{}", kHelp);
  } else if (word == "clear" || word == "new") {
    Forget();
    Note("the conversation is forgotten");
  } else if (word == "system") {
    SetSystem(rest);
    Note(rest.empty() ? "there is no system message" : "the system message is set");
  } else if (word == "receipt") {
    fmt::print("{}\n", receipt_.is_null() ? "no answer has come with a receipt yet"
                                          : receipt_.dump(2, ' ', false, json::error_handler_t::replace));
  } else if (word == "set" && rest.empty()) {
    const std::string set = settings_.ToString();
    fmt::print("{}\n", set.empty() ? "nothing is set: the model's and the server's own values are used" : set);
  } else if (word == "set") {
    const std::string name = TakeWord(rest);
    status = rest.empty() ? InvalidArgument("/set {} VALUE: no value is given", name) : settings_.Set(name, rest);
    if (status.ok()) Note(fmt::format("{} is {}", name, rest));
  } else {
    status = InvalidArgument("/{}: there is no such command; /help lists them", word);
  }
  if (!status.ok()) {
    if (!options_.terminal) return status;
    fmt::print(stderr, "{}\n", MessageOf(status));
  }
  std::fflush(stdout);
  return true;
}

absl::StatusOr<TextResult> ChatSession::Generate(const TextRequest& plain, std::string& text) {
  AnswerWriter writer(options_.out, ::isatty(STDOUT_FILENO) != 0);
  const StopOnInterrupt stop(generator_, interrupt_);
  TextRequest request = plain;
  request.on_reasoning = [&](const std::string& piece) {
    writer.Write(piece, /*reasoning=*/true);
    return !stop.stopped();
  };
  auto result = generator_.Generate(request, [&](const std::string& piece) {
    text += piece;
    writer.Write(piece, /*reasoning=*/false);
    return !stop.stopped();
  });
  if (stop.stopped()) return absl::CancelledError("stopped");
  return result;
}

absl::Status ChatSession::Answer(const std::string& message) {
  messages_.push_back({{"role", "user"}, {"content", message}});
  TextRequest request{.messages = messages_, .model_sampling = true};
  request.reuse_options = {{"session", session_}};
  settings_.Apply(request);
  std::string text;
  const auto result = Generate(request, text);
  const bool stopped = result.status().code() == absl::StatusCode::kCancelled;
  if (result.ok() || stopped) fmt::print("\n");
  // Without an answer the question was never put. The part of an answer that was stopped stays.
  if (!result.ok() && (!stopped || text.empty()))
    messages_.erase(messages_.size() - 1);
  else
    messages_.push_back({{"role", "assistant"}, {"content", text}});
  receipt_ = result.ok() ? result->receipt : json();
  if (result.ok()) {
    ShowStatistics(*result);
    return absl::OkStatus();
  }
  if (!options_.terminal) return result.status();
  if (stopped)
    Note("[stopped]");
  else
    fmt::print(stderr, "{}\n", MessageOf(result.status()));
  return absl::OkStatus();
}

void ChatSession::ShowStatistics(const TextResult& result) const {
  std::string ran;
  if (result.receipt.is_object() && result.receipt.contains("reuse") && result.receipt.contains("decode"))
    ran = fmt::format(", {}/{}", result.receipt.value("reuse", ""), result.receipt.value("decode", ""));
  // The first tokens may arrive at once; a rate of a few says nothing.
  const std::string pace = result.completion_tokens < kTokensForARate
                               ? fmt::format("{} tokens", result.completion_tokens)
                               : fmt::format("{:.1f} tokens/s", result.tokens_per_s());
  Note(fmt::format("[TTFT {:.0f} ms, {}, {} of {} prompt tokens cached{}]", result.ttft_s * 1e3, pace,
                   result.cached_tokens, result.prompt_tokens, ran));
  if (result.finish_reason == "length")
    Note(fmt::format("[the answer ends at {} tokens: /set max_tokens N]", result.completion_tokens));
}

}  // namespace spl::cli
