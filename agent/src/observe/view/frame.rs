//! Header and footer, and the styles of the view.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Color;
use ratatui::style::Modifier;
use ratatui::style::Style;
use ratatui::text::Line;
use ratatui::text::Span;
use ratatui::widgets::Widget;

use super::Settings;
use crate::observe::record::Resource;
use crate::observe::report;
use crate::observe::state::ObservedNode;
use crate::observe::state::PODS;
use crate::observe::text;

/// Titles and headings.
pub(super) const TITLE: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);
/// Secondary information.
pub(super) const DIM: Style = Style::new().fg(Color::DarkGray);
/// Warnings.
pub(super) const WARNING: Style = Style::new().fg(Color::Yellow);
/// Errors.
pub(super) const BAD: Style = Style::new().fg(Color::Red);
/// Normal states.
pub(super) const GOOD: Style = Style::new().fg(Color::Green);

/// Width of a sparkline of the node.
const SPARK: usize = 20;
/// Lines about missing evidence at most; the rest is summed up.
const LACKS: usize = 4;

/// The style of a percentage of time that was waited.
pub(super) fn pressure_style(percent: f64) -> Style {
    match percent {
        high if high >= 20.0 => BAD,
        some if some >= 5.0 => WARNING,
        _ => Style::new(),
    }
}

/// Lines of the header: identity, pressure, and what is missing.
pub(super) fn header_height(node: &ObservedNode, height: u16) -> u16 {
    let lacks = u16::try_from(lacks(node).len()).unwrap_or(u16::MAX);
    2 + lacks.min(height / 4)
}

pub(super) fn header(node: &ObservedNode, settings: &Settings, area: Rect, buffer: &mut Buffer) {
    let mut lines = vec![identity(node, settings), pressure(node)];
    lines.extend(lacks(node).into_iter().map(|lack| Line::styled(lack, WARNING)));
    for (line, row) in lines.into_iter().zip(area.rows()) {
        line.render(row, buffer);
    }
}

fn identity(node: &ObservedNode, settings: &Settings) -> Line<'static> {
    let start = &node.start;
    let runtime = node.runtime.as_ref();
    let runtime = runtime.map_or("no runtime".to_owned(), |one| format!("{} {}", one.name, one.version));
    let waiting = |pods: usize| if node.ready { format!("{pods} pods") } else { "looking for pods".to_owned() };
    let facts = format!(
        "  {}  {runtime}  kernel {}  cgroup {}  {}  {}",
        start.node,
        start.kernel,
        start.cgroups,
        waiting(node.pods.len()),
        node.now.clock()
    );
    let mut spans = vec![Span::styled("keblet observe", TITLE), Span::raw(facts)];
    if settings.frozen {
        spans.push(Span::styled("  FROZEN", BAD.add_modifier(Modifier::BOLD)));
    }
    Line::from(spans)
}

fn pressure(node: &ObservedNode) -> Line<'static> {
    let Some(pressure) = &node.pressure else { return Line::styled("not measured yet", DIM) };
    let mut spans = Vec::new();
    for resource in Resource::ALL {
        let Some(waiting) = pressure.waiting(resource) else { continue };
        let history = text::sparkline(&node.history.last(resource, SPARK), SPARK);
        let style = pressure_style(waiting.some.avg10);
        let percents = format!(" {:.1}/{:.1}% ", waiting.some.avg10, waiting.full.avg10);
        spans.extend([Span::styled(resource.as_str(), DIM), Span::styled(percents, style)]);
        spans.extend([Span::styled(history, style), Span::raw("  ")]);
    }
    if spans.is_empty() {
        spans.push(Span::styled("no pressure information  ", DIM));
    }
    let cpus = pressure.cpus.map(|cpus| format!("{cpus:.1} CPUs  ")).unwrap_or_default();
    spans.push(Span::raw(format!("{cpus}{}", report::memory(pressure))));
    Line::from(spans)
}

fn lacks(node: &ObservedNode) -> Vec<String> {
    let mut lines: Vec<String> = node.lacks().map(|sensor| format!("! {}", report::lack(sensor))).collect();
    let lost = &node.lost;
    let count = lost.exits.saturating_add(lost.cgroups).saturating_add(lost.watches);
    if count > 0 {
        lines.push(format!("! {count} records of the kernel were lost; all pods were listed instead"));
    }
    if node.pods_left_out > 0 {
        lines.push(format!("! {PODS} pods are kept; {} records of further ones were left out", node.pods_left_out));
    }
    if lines.len() > LACKS {
        let more = lines.len() - (LACKS - 1);
        lines.truncate(LACKS - 1);
        lines.push(format!("! and {more} more; `keblet doctor` explains what this node lacks"));
    }
    lines
}

pub(super) fn footer(settings: &Settings, area: Rect, buffer: &mut Buffer) {
    let line = if settings.typing {
        Line::from(vec![Span::styled("/", TITLE), Span::raw(settings.filter.clone()), Span::styled("█", DIM)])
    } else {
        let filter = if settings.filter.is_empty() { String::new() } else { format!("  only: {}", settings.filter) };
        let direction = if settings.reverse { ", reversed" } else { "" };
        let keys = "q quit  ↑↓ select  ⏎ open  s sort  r reverse  / filter  space freeze  ? help";
        Line::styled(format!("{keys}  by: {}{direction}{filter}", settings.sort.as_str()), DIM)
    };
    line.render(area, buffer);
}
