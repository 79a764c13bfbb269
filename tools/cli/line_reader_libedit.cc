// Line editing by libedit. Compiled where configuring found it.
#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <cwchar>
#include <utility>

#include "tools/cli/line_reader.h"

namespace spl::cli {
namespace {

constexpr int kMaxHistory = 1000;
constexpr char kUnprinted = '\1';  // encloses what a prompt sends without moving the cursor
constexpr char kPasteBegin[] = "\x1b[?2004h",
               kPasteEnd[] = "\x1b[?2004l";  // pastes arrive between ESC[200~ and ESC[201~
constexpr char kPasteStop[] = "\x1b[201~";

// The characters of the terminal for the calling thread: UTF-8 also where the environment names no locale.
class Utf8Locale {
 public:
  Utf8Locale() : locale_(::newlocale(LC_CTYPE_MASK, "", nullptr)) {
    if (locale_ != nullptr && std::strcmp(::nl_langinfo_l(CODESET, locale_), "UTF-8") == 0) return;
    if (locale_ != nullptr) ::freelocale(locale_);
    locale_ = ::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  }
  ~Utf8Locale() {
    if (locale_ != nullptr) ::freelocale(locale_);
  }
  Utf8Locale(const Utf8Locale&) = delete;
  Utf8Locale& operator=(const Utf8Locale&) = delete;

  locale_t get() const { return locale_; }

 private:
  locale_t locale_;
};

class InLocale {
 public:
  explicit InLocale(const Utf8Locale& locale)
      : old_(::uselocale(locale.get() != nullptr ? locale.get() : static_cast<locale_t>(nullptr))) {}
  ~InLocale() { ::uselocale(old_); }
  InLocale(const InLocale&) = delete;
  InLocale& operator=(const InLocale&) = delete;

 private:
  const locale_t old_;
};

class EditReader final : public LineReader {
 public:
  EditReader(InterruptEvent& interrupt, Style style) : interrupt_(interrupt), style_(style) {
    const InLocale in(locale_);
    HistEvent event;
    history_ = ::history_init();
    ::history(history_, &event, H_SETSIZE, kMaxHistory);
    ::history(history_, &event, H_SETUNIQUE, 1);
    edit_ = ::el_init("splice", stdin, stdout, stderr);
    if (edit_ == nullptr) return;
    ::el_set(edit_, EL_CLIENTDATA, this);
    ::el_set(edit_, EL_PROMPT_ESC, &EditReader::Prompt, kUnprinted);
    ::el_set(edit_, EL_EDITOR, "emacs");
    ::el_set(edit_, EL_SIGNAL, 0);  // Ctrl-C comes through interrupt_
    ::el_set(edit_, EL_HIST, history, history_);
    ::el_set(edit_, EL_GETCFN, &EditReader::ReadChar);
    Bind();
    ::el_source(edit_, nullptr);
  }
  ~EditReader() override {
    const InLocale in(locale_);
    if (edit_ != nullptr) ::el_end(edit_);
    ::history_end(history_);
  }

  bool usable() const { return edit_ != nullptr; }

  End Read(const std::string& prompt, std::string& line) override {
    const InLocale in(locale_);
    prompt_ = Bold(prompt);
    line.clear();
    ::el_set(edit_, EL_PREP_TERM, 1);  // before the prompt is seen: a key that the terminal takes itself is lost
    Send(kPasteBegin);
    int size = 0;
    const char* const text = ::el_gets(edit_, &size);
    Send(kPasteEnd);
    if (interrupt_.Take()) {
      ::el_reset(edit_);
      Send("\r\n");
      return End::kInterrupted;
    }
    if (text == nullptr || size <= 0) {
      Send("\r\n");
      return End::kInput;
    }
    line.assign(text, static_cast<size_t>(size));
    while (line.ends_with('\n') || line.ends_with('\r')) line.pop_back();
    return End::kLine;
  }

  void AddToHistory(const std::string& text) override {
    const InLocale in(locale_);
    HistEvent event;
    ::history(history_, &event, H_ENTER, text.c_str());
  }

 private:
  static EditReader& Of(EditLine* edit) {
    void* self = nullptr;
    ::el_get(edit, EL_CLIENTDATA, &self);
    return *static_cast<EditReader*>(self);
  }

  // Emphasizes all but the last character: libedit sends a sequence together with the character behind it, and drops
  // one that has none.
  std::string Bold(const std::string& prompt) const {
    if (!style_.color || prompt.empty()) return prompt;
    const auto unprinted = [](const char* sequence) { return kUnprinted + std::string(sequence) + kUnprinted; };
    return unprinted("\x1b[1m") + prompt.substr(0, prompt.size() - 1) + unprinted("\x1b[0m") + prompt.back();
  }

  static char* Prompt(EditLine* edit) { return Of(edit).prompt_.data(); }

  // One character of the terminal; -1 with EINTR: Ctrl-C. 0: the end of the input.
  static int ReadChar(EditLine* edit, wchar_t* out) {
    EditReader& self = Of(edit);
    std::mbstate_t state{};
    while (true) {
      pollfd both[] = {{STDIN_FILENO, POLLIN, 0}, {self.interrupt_.fd(), POLLIN, 0}};
      if (::poll(both, 2, -1) < 0) {
        if (errno == EINTR) continue;
        return -1;
      }
      if (both[1].revents != 0) {
        errno = EINTR;
        return -1;
      }
      char byte = 0;
      const ssize_t size = ::read(STDIN_FILENO, &byte, 1);
      if (size < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (size <= 0) return static_cast<int>(size);
      switch (std::mbrtowc(out, &byte, 1, &state)) {
        case static_cast<size_t>(-1):  // no UTF-8: the character is left out
          state = {};
          break;
        case static_cast<size_t>(-2):
          break;
        case 0:
          *out = L'\0';
          return 1;
        default:
          return 1;
      }
    }
  }

  static unsigned char Paste(EditLine* edit, wint_t) {
    std::wstring text;
    const std::wstring stop(kPasteStop, kPasteStop + sizeof kPasteStop - 1);
    wchar_t c = 0;
    while (!text.ends_with(stop)) {
      const int got = ReadChar(edit, &c);
      if (got <= 0) return got == 0 ? CC_EOF : CC_ERROR;
      text += c == L'\r' ? L'\n' : c;
    }
    text.resize(text.size() - stop.size());
    while (text.ends_with(L'\n')) text.pop_back();  // Enter sends, and not the paste
    std::erase_if(text, [](wchar_t character) { return character < L' ' && character != L'\n' && character != L'\t'; });
    return text.empty() || ::el_winsertstr(edit, text.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
  }

  static unsigned char NewLine(EditLine* edit, wint_t) {
    return ::el_winsertstr(edit, L"\n") == 0 ? CC_REFRESH : CC_ERROR;
  }

  void Bind() {
    ::el_set(edit_, EL_ADDFN, "splice-paste", "insert a pasted text", &EditReader::Paste);
    ::el_set(edit_, EL_ADDFN, "splice-newline", "insert a line end", &EditReader::NewLine);
    const std::pair<const char*, const char*> keys[] = {
        {"\\e[200~", "splice-paste"}, {"\\e^M", "splice-newline"},       {"\\e^J", "splice-newline"},
        {"^R", "em-inc-search-prev"}, {"\\e[3~", "ed-delete-next-char"}, {"\\e[H", "ed-move-to-beg"},
        {"\\e[1~", "ed-move-to-beg"}, {"\\e[F", "ed-move-to-end"},       {"\\e[4~", "ed-move-to-end"},
        {"\\e[1;5C", "em-next-word"}, {"\\e[1;5D", "ed-prev-word"},
    };
    for (const auto& [key, command] : keys) ::el_set(edit_, EL_BIND, key, command, nullptr);
  }

  static void Send(const char* text) {
    std::fputs(text, stdout);
    std::fflush(stdout);
  }

  InterruptEvent& interrupt_;
  const Style style_;
  const Utf8Locale locale_;
  std::string prompt_;
  History* history_ = nullptr;
  EditLine* edit_ = nullptr;
};

}  // namespace

std::unique_ptr<LineReader> MakeTerminalReader(InterruptEvent& interrupt, Style style) {
  auto reader = std::make_unique<EditReader>(interrupt, style);
  return reader->usable() ? std::move(reader) : nullptr;
}

}  // namespace spl::cli
