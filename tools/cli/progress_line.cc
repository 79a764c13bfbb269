#include "tools/cli/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "services/base/byte_size.h"
#include "tools/cli/pull_display.h"
#include "tools/cli/terminal.h"

namespace spl::cli {
namespace {

constexpr double kQuietSeconds = 2, kDrawSeconds = 0.1, kLineSeconds = 10;
constexpr std::chrono::milliseconds kStageTick{250};
constexpr size_t kBarColumns = 30;

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

ProgressLine::ProgressLine()
    : ProgressLine(stderr, ::isatty(STDERR_FILENO) != 0, LineWidthOf(STDERR_FILENO), SteadySeconds) {}

ProgressLine::ProgressLine(std::FILE* out, bool terminal, size_t width, Clock clock)
    : out_(out), terminal_(terminal), width_(width), clock_(std::move(clock)), start_s_(clock_()), last_s_(start_s_) {}

std::string ProgressLine::LineOf(uint64_t done, uint64_t total, const std::string& text, double elapsed_s) const {
  std::string line = text;
  if (total > 0 && done > 0 && done < total)
    line += fmt::format(", {} left",
                        FormatSeconds(elapsed_s * static_cast<double>(total - done) / static_cast<double>(done)));
  if (!terminal_) return line;
  if (total > 0 && line.size() + 13 < width_)
    line = ProgressBar(done, total, std::min(kBarColumns, width_ - line.size() - 3)) + " " + line;
  if (line.size() > width_) line.resize(width_);
  return line;
}

void ProgressLine::Update(uint64_t done, uint64_t total, const std::string& text) {
  const double now = clock_(), elapsed_s = now - start_s_;
  if (terminal_ ? elapsed_s < kQuietSeconds || (drawn_ && now - last_s_ < kDrawSeconds && done != total)
                : now - last_s_ < kLineSeconds)
    return;
  last_s_ = now;
  drawn_ = true;
  const std::string line = LineOf(done, total, text, elapsed_s);
  if (terminal_)
    fmt::print(out_, "\r\x1b[K{}", line);
  else
    fmt::print(out_, "{}\n", line);
  std::fflush(out_);
}

void ProgressLine::Finish() {
  if (terminal_ && drawn_) {
    fmt::print(out_, "\r\x1b[K");
    std::fflush(out_);
  }
  drawn_ = false;
  start_s_ = last_s_ = clock_();
}

std::string StageText(const std::string& stage, uint64_t done_bytes, uint64_t total_bytes, double seconds) {
  if (total_bytes == 0) return fmt::format("{}: {}", stage, FormatSeconds(seconds));
  return fmt::format("{}: {} %, {} of {}", stage, done_bytes * 100 / total_bytes, FormatByteSize(done_bytes),
                     FormatByteSize(total_bytes));
}

StageLine::StageLine() : StageLine(std::make_unique<ProgressLine>()) {}

StageLine::StageLine(std::unique_ptr<ProgressLine> line)
    : line_(std::move(line)), since_(std::chrono::steady_clock::now()), thread_([this] { Run(); }) {}

StageLine::~StageLine() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StageLine::Begin(const std::string& stage) {
  const std::lock_guard lock(mutex_);
  stage_ = stage;
  since_ = std::chrono::steady_clock::now();
  done_bytes_ = total_bytes_ = 0;
}

void StageLine::Update(uint64_t done_bytes, uint64_t total_bytes) {
  const std::lock_guard lock(mutex_);
  done_bytes_ = done_bytes;
  total_bytes_ = total_bytes;
}

void StageLine::Run() {
  std::unique_lock lock(mutex_);
  while (!ended_) {
    if (!stage_.empty()) {
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - since_;
      line_->Update(done_bytes_, total_bytes_, StageText(stage_, done_bytes_, total_bytes_, time.count()));
    }
    changed_.wait_for(lock, kStageTick);
  }
  line_->Finish();
}

}  // namespace spl::cli
