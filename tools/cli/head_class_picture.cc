#include "tools/cli/head_class_picture.h"

#include <fmt/format.h>

#include <algorithm>

namespace spl::cli {
namespace {

using engine::HeadClassMap;

struct Need {
  float edge = 0, q99 = 0, shift = 0, answers = -1;
  // The measure that ranks heads, unless RedKnot's ranking is chosen (HeadRanking).
  float value() const { return answers >= 0 ? answers : q99; }
};

Need NeedOf(const HeadClassMap& map, int32_t layer, int32_t head) {
  if (map.profile().empty()) return {};
  const auto i = static_cast<size_t>(layer * map.num_kv_heads() + head);
  const engine::HeadProfile& p = map.profile();
  return {p.edge_mass[i], p.edge_mass_q99[i], p.prefix_shift[i], p.answer_mass.empty() ? -1 : p.answer_mass[i]};
}

std::string Escape(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '<' ? "&lt;" : c == '&' ? "&amp;" : std::string(1, c);
  return out;
}

}  // namespace

std::string HeadClassTable(const HeadClassMap& map) {
  std::string out = "layer";
  for (int32_t head = 0; head < map.num_kv_heads(); ++head) out += fmt::format("{:>8}", head);
  out += '\n';
  for (int32_t layer = 0; layer < map.num_layers(); ++layer) {
    out += fmt::format("{:>5}", layer);
    for (int32_t head = 0; head < map.num_kv_heads(); ++head) {
      const char letter = map.at(layer, head).is_global ? 'G' : '.';
      out += map.profile().empty() ? fmt::format("{:>8}", letter)
                                   : fmt::format("{:>6.2f} {}", NeedOf(map, layer, head).value(), letter);
    }
    out += '\n';
  }
  return out;
}

std::string HeadClassSvg(const HeadClassMap& map, const std::string& title) {
  constexpr int kCell = 22, kLeft = 60, kTop = 56, kBottom = 46;
  const int width = kLeft + map.num_layers() * kCell + 30, height = kTop + map.num_kv_heads() * kCell + kBottom;
  std::string svg = fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{}' height='{}' font-family='sans-serif'>\n"
      "<rect width='100%' height='100%' fill='white'/>\n<text x='{}' y='20' font-size='14'>{}</text>\n"
      "<text x='{}' y='38' font-size='11' fill='#555'>{:.0f} % global (framed); darker: needs more of the "
      "context</text>\n",
      std::max(width, 420), height, kLeft - 40, Escape(title), kLeft - 40, 100 * map.global_share());
  for (int32_t layer = 0; layer < map.num_layers(); ++layer) {
    for (int32_t head = 0; head < map.num_kv_heads(); ++head) {
      const Need need = NeedOf(map, layer, head);
      const int grey = 245 - static_cast<int>(200 * std::min(1.0f, need.value()));
      const engine::HeadClass& of = map.at(layer, head);
      const std::string rule = of.is_global ? "global" : fmt::format("local, window {}, {} sinks", of.window, of.sinks);
      svg += fmt::format(
          "<rect x='{}' y='{}' width='{}' height='{}' fill='rgb({},{},255)' stroke='{}' stroke-width='{}'>"
          "<title>layer {} head {}: {}; edge mass {:.3f} (99 %: {:.3f}), prefix shift {:.3f}</title></rect>\n",
          kLeft + layer * kCell + 2, kTop + head * kCell + 2, kCell - 4, kCell - 4, grey, grey,
          of.is_global ? "#d62728" : "#cccccc", of.is_global ? 2.5 : 1.0, layer, head, rule, need.edge, need.q99,
          need.shift);
    }
  }
  const int below = kTop + map.num_kv_heads() * kCell + 16;
  for (int32_t layer = 0; layer<map.num_layers(); layer += map.num_layers()> 24 ? 4 : 1)
    svg += fmt::format("<text x='{}' y='{}' font-size='10' text-anchor='middle'>{}</text>\n",
                       kLeft + layer * kCell + kCell / 2, below, layer);
  for (int32_t head = 0; head < map.num_kv_heads(); ++head)
    svg += fmt::format("<text x='{}' y='{}' font-size='10' text-anchor='end'>{}</text>\n", kLeft - 6,
                       kTop + head * kCell + kCell / 2 + 4, head);
  svg += fmt::format(
      "<text x='{}' y='{}' font-size='11'>layer</text>\n<text x='6' y='{}' font-size='11'>KV head</text>\n</svg>\n",
      kLeft, below + 18, kTop - 4);
  return svg;
}

}  // namespace spl::cli
