#include <cstdio>

#include "client/plot.h"
#include "client/plot_drawing.h"

namespace hierad {
namespace {

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else if (c == '&') out += "&amp;";
    else if (c == '"') out += "&quot;";
    else out += c;
  }
  return out;
}

std::string Tenths(double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.1f", value);
  return buffer;
}

std::string Color(uint32_t color) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "#%06x", unsigned(color));
  return buffer;
}

}  // namespace

std::string PlotSvg(const Plot& plot) {
  const Drawing drawing = DrawPlot(plot);
  const std::string size = std::to_string(Drawing::kWidth) + "\" height=\"" + std::to_string(Drawing::kHeight) + "\"";
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + size + " font-family=\"sans-serif\" font-size=\"13\">\n"
                    "<rect width=\"" + size + " fill=\"#fff\"/>\n";
  for (const Drawing::Line& l : drawing.lines) {
    svg += "<line x1=\"" + Tenths(l.x0) + "\" y1=\"" + Tenths(l.y0) + "\" x2=\"" + Tenths(l.x1) + "\" y2=\"" + Tenths(l.y1) + "\" stroke=\"" + Color(l.color) +
           "\" stroke-width=\"" + Tenths(l.width) + "\"/>\n";
  }
  svg += "<path fill=\"none\" stroke=\"" + Color(Drawing::kCurve) + "\" stroke-width=\"" + Tenths(Drawing::kCurveWidth) + "\" stroke-linejoin=\"round\" d=\"";
  for (const auto& curve : drawing.curves) {
    for (size_t i = 0; i < curve.size(); ++i) svg += (i == 0 ? "M" : "L") + Tenths(curve[i].x) + " " + Tenths(curve[i].y);
  }
  svg += "\"/>\n";
  for (const Drawing::Text& t : drawing.texts) {
    const char* anchor = t.anchor == Anchor::kStart ? "start" : t.anchor == Anchor::kMiddle ? "middle" : "end";
    svg += "<text x=\"" + Tenths(t.x) + "\" y=\"" + Tenths(t.y) + "\" text-anchor=\"" + anchor + "\" fill=\"" + Color(Drawing::kInk) + "\"" +
           (t.large ? " font-size=\"16\"" : "") + ">" + Escaped(t.words) + "</text>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace hierad
