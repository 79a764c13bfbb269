#include "services/base/help_formatter.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace spl {
namespace {

constexpr size_t kNameColumns = 30, kLeastWidth = 40;
constexpr size_t kNarrow = 60, kWide = 110, kNoTerminal = 100;

std::string HowMany(const CLI::App& group) {
  const size_t least = group.get_require_option_min(), most = group.get_require_option_max();
  if (least == 1 && most == 1) return "exactly one of them";
  if (least == 0 && most == 1) return "at most one of them";
  if (least == 0 && most == 0) return "";
  if (most == 0) return fmt::format("at least {} of them", least);
  return fmt::format("{} to {} of them", least, most);
}

// Title of an option group, which CLI11 keeps as a subcommand without a name.
std::string TitleOf(const CLI::App& group) {
  std::string title = group.get_group();
  if (!title.empty() && title[0] >= 'a' && title[0] <= 'z') title[0] = static_cast<char>(title[0] - 'a' + 'A');
  const std::string how_many = HowMany(group);
  return how_many.empty() ? title : title + " (" + how_many + ")";
}

}  // namespace

HelpFormatter::HelpFormatter(size_t width) : width_(std::max(width, kLeastWidth)) { column_width(kNameColumns); }

std::string HelpFormatter::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  // A part of --help-all, which no program has.
  if (mode == CLI::AppFormatMode::Sub) return CLI::Formatter::make_help(app, std::move(name), mode);
  return make_description(app) + make_usage(app, std::move(name)) + make_positionals(app) + OptionsOf(*app) +
         SubcommandsOf(*app) + '\n' + make_footer(app);
}

std::string HelpFormatter::OptionsOf(const CLI::App& app) const {
  std::string text;
  for (const CLI::App* group : app.get_subcommands({})) {
    if (!group->get_name().empty()) continue;
    const auto options = group->get_options(
        [&](const CLI::Option* option) { return !option->get_group().empty() && option != group->get_help_ptr(); });
    if (!options.empty()) text += make_group(TitleOf(*group), false, options);
  }
  std::string last;
  for (const std::string& group : app.get_groups()) {
    const auto options = app.get_options(
        [&](const CLI::Option* option) { return option->get_group() == group && option->nonpositional(); });
    if (group.empty() || options.empty()) continue;
    const bool only_help = options.size() == 1 && options[0] == app.get_help_ptr();
    (only_help ? last : text) += make_group(group, false, options);
  }
  return text + last;
}

std::string HelpFormatter::SubcommandsOf(const CLI::App& app) const {
  std::string text;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (!command->get_name().empty() && !command->get_group().empty()) text += make_subcommand(command);
  }
  return text.empty() ? "" : "\nSubcommands:\n" + text;
}

std::string HelpFormatter::make_subcommand(const CLI::App* app) const {
  return Entry(app->get_display_name(true), app->get_description());
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  return Entry(make_option_name(option, is_positional) + make_option_opts(option), make_option_desc(option));
}

// CLI11 writes "TYPE:CHECK"; the check says more.
std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  std::string text = CLI::Formatter::make_option_opts(option);
  const std::string type = option->get_type_name();
  const size_t colon = type.find(':'), at = text.find(type);
  if (colon == std::string::npos || at == std::string::npos || !option->get_option_text().empty()) return text;
  return text.replace(at, type.size(), type.substr(colon + 1));
}

std::string HelpFormatter::Entry(const std::string& name, const std::string& description) const {
  std::string text = "  " + name;
  const std::string indent(width_ < kNarrow ? 6 : kNameColumns, ' ');
  if (text.size() + 1 < indent.size())
    text.resize(indent.size(), ' ');
  else if (!description.empty())
    text += "\n" + indent;
  size_t column = indent.size();
  for (size_t begin = 0; begin < description.size();) {
    const size_t end = std::min(description.find_first_of(" \n", begin), description.size());
    const size_t length = end - begin;
    const bool first = column == indent.size();
    if (!first && column + 1 + length > width_) {
      text += "\n" + indent;
      column = indent.size();
    } else if (!first) {
      text += ' ';
      ++column;
    }
    text.append(description, begin, length);
    column += length;
    if (end < description.size() && description[end] == '\n') {
      text += "\n" + indent;
      column = indent.size();
    }
    begin = end + 1;
  }
  text.resize(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

std::shared_ptr<HelpFormatter> MakeHelpFormatter() {
  winsize window{};
  const bool terminal =
      ::isatty(STDOUT_FILENO) != 0 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0;
  return std::make_shared<HelpFormatter>(terminal ? std::clamp<size_t>(window.ws_col, kNarrow, kWide) : kNoTerminal);
}

}  // namespace spl
