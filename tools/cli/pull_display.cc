#include "tools/cli/pull_display.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "services/base/byte_size.h"
#include "tools/cli/terminal.h"

namespace spl::cli {
namespace {

constexpr double kRateSeconds = 5;
constexpr double kLineSeconds = 10;
constexpr size_t kMaxBars = 8;
constexpr size_t kNameColumns = 36;

std::string Line(std::string name, uint64_t done, uint64_t size, const std::string& rest, size_t width) {
  if (name.size() > kNameColumns) name = "…" + name.substr(name.size() - kNameColumns + 1);
  // "…" is three bytes and one column.
  const size_t pad = kNameColumns + (name.starts_with("…") ? 2 : 0);
  std::string line = fmt::format("{:<{}} ", name, pad);
  const std::string numbers =
      size == 0 ? FormatByteSize(done) : fmt::format("{} of {}", FormatByteSize(done), FormatByteSize(size));
  const size_t fixed = kNameColumns + 1 + 3 + 26 + rest.size();
  if (width > fixed + 10) line += ProgressBar(done, size, std::min<size_t>(30, width - fixed)) + " ";
  line += numbers + rest;
  const size_t extra = name.starts_with("…") ? 2 : 0;
  if (line.size() > width + extra) line.resize(width + extra);
  return line;
}

std::string RateText(const hub::PullProgress& progress, double bytes_per_s) {
  if (bytes_per_s <= 0) return "";
  const double left = static_cast<double>(progress.size - std::min(progress.size, progress.done)) / bytes_per_s;
  return fmt::format(", {}/s, {} left", FormatByteSize(static_cast<uint64_t>(bytes_per_s)), FormatSeconds(left));
}

}  // namespace

std::string ProgressBar(uint64_t done, uint64_t size, size_t columns) {
  const double share = size == 0 ? 0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(size));
  const auto full = static_cast<size_t>(share * static_cast<double>(columns));
  return "[" + std::string(full, '#') + std::string(columns - full, '.') + "]";
}

std::string FormatSeconds(double seconds) {
  const auto whole = static_cast<int64_t>(std::min(seconds, 1e9) + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

std::vector<std::string> PullBars(const hub::PullProgress& progress, double bytes_per_s, size_t width,
                                  size_t max_files) {
  std::vector<std::string> lines;
  size_t complete = 0;
  for (const auto& file : progress.files) {
    complete += file.complete ? 1 : 0;
    if (file.complete || file.done == 0 || lines.size() >= max_files) continue;
    lines.push_back(Line(file.name, file.done, file.size, "", width));
  }
  lines.push_back(Line(fmt::format("total, {} of {} files", complete, progress.files.size()), progress.done,
                       progress.size, RateText(progress, bytes_per_s), width));
  return lines;
}

double PullDisplay::Rate(const hub::PullProgress& progress) {
  samples_.emplace_back(progress.seconds, progress.done);
  while (samples_.size() > 2 && samples_.front().first < progress.seconds - kRateSeconds) samples_.pop_front();
  const double seconds = samples_.back().first - samples_.front().first;
  const uint64_t from = samples_.front().second;
  return seconds <= 0 || progress.done < from ? 0 : static_cast<double>(progress.done - from) / seconds;
}

void PullDisplay::Print(const std::string& line) { fmt::print(out_, "{}\n", line); }

void PullDisplay::Update(const hub::PullProgress& progress) {
  using Stage = hub::PullProgress::Stage;
  if (terminal_ && num_bars_ > 0) fmt::print(out_, "\x1b[{}A\r\x1b[J", num_bars_);
  num_bars_ = 0;
  if (progress.stage == Stage::kWaiting && !said_waiting_) {
    said_waiting_ = true;
    Print("another pull of this model is under way; waiting for it");
  }
  for (const auto& file : progress.files) {
    if (file.complete && finished_.insert(file.name).second)
      Print(fmt::format("{:<{}} {}", file.name, kNameColumns, FormatByteSize(file.size)));
  }
  if (progress.stage == Stage::kFetching) {
    const double rate = Rate(progress);
    if (terminal_) {
      const std::vector<std::string> bars = PullBars(progress, rate, width_, kMaxBars);
      for (const std::string& bar : bars) Print(bar);
      num_bars_ = bars.size();
    } else if (progress.seconds - last_line_s_ >= kLineSeconds) {
      last_line_s_ = progress.seconds;
      Print(PullBars(progress, rate, 200, 0).back());
    }
  }
  std::fflush(out_);
}

PullDisplay MakePullDisplay() { return PullDisplay(stderr, ::isatty(STDERR_FILENO) != 0, LineWidthOf(STDERR_FILENO)); }

}  // namespace spl::cli
