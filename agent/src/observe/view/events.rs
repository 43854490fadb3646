//! Exits and OOM kills, and waiting pods with the cause: the lower third of the view.

use ratatui::buffer::Buffer;
use ratatui::layout::Constraint;
use ratatui::layout::Layout;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Line;
use ratatui::text::Span;
use ratatui::widgets::Block;
use ratatui::widgets::Borders;
use ratatui::widgets::Widget;

use super::frame::BAD;
use super::frame::DIM;
use super::frame::TITLE;
use super::frame::WARNING;
use super::pods::exit_style;
use super::pods::exit_text;
use crate::observe::record::ExitRecord;
use crate::observe::record::OomRecord;
use crate::observe::record::Timestamp;
use crate::observe::report;
use crate::observe::state::ObservedNode;
use crate::observe::text;

pub(super) fn draw(node: &ObservedNode, area: Rect, buffer: &mut Buffer) {
    let [left, right] = Layout::horizontal([Constraint::Percentage(60), Constraint::Fill(1)]).areas(area);
    list(" Exits and OOM kills ", happened(node), left, buffer);
    let stalls = node.current_stalls().into_iter().map(|stall| Line::styled(report::stall(stall), WARNING));
    let stalls: Vec<Line<'_>> = stalls.collect();
    let stalls = if stalls.is_empty() { vec![Line::styled("no pod waits noticeably", DIM)] } else { stalls };
    list(" Stalls by cause ", stalls, right, buffer);
}

/// Lines below a title, wrapped.
pub(super) fn list(title: &'static str, lines: Vec<Line<'_>>, area: Rect, buffer: &mut Buffer) {
    let block = Block::new().borders(Borders::TOP).border_style(DIM).title(Span::styled(title, TITLE));
    let inner = block.inner(area);
    block.render(area, buffer);
    let text = ratatui::text::Text::from(lines);
    ratatui::widgets::Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true }).render(inner, buffer);
}

/// The latest first.
fn happened(node: &ObservedNode) -> Vec<Line<'static>> {
    let exits = node.exits.iter().map(|(time, exit)| (moment(*time, exit), exit_line(node, *time, exit)));
    let kills = node.oom_kills.iter().map(|(time, oom)| (*time, kill_line(node, *time, oom)));
    let mut all: Vec<(Timestamp, Line<'static>)> = exits.chain(kills).collect();
    all.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    let lines: Vec<Line<'static>> = all.into_iter().take(50).map(|(_, line)| line).collect();
    if lines.is_empty() { vec![Line::styled("nothing since observing began", DIM)] } else { lines }
}

fn moment(time: Timestamp, exit: &ExitRecord) -> Timestamp {
    exit.exit.finished_at.unwrap_or(time)
}

fn ago(node: &ObservedNode, time: Timestamp) -> Span<'static> {
    Span::styled(format!("{:>5} ", text::age(node.now.since(time))), DIM)
}

/// An exit.
pub(super) fn exit_line(node: &ObservedNode, time: Timestamp, exit: &ExitRecord) -> Line<'static> {
    let what = format!("{} {}: ", report::pod(&exit.pod), exit.container);
    let message = if exit.exit.message.is_empty() { String::new() } else { format!("  {}", exit.exit.message) };
    Line::from(vec![
        ago(node, moment(time, exit)),
        Span::raw(what),
        Span::styled(exit_text(&exit.exit), exit_style(&exit.exit)),
        Span::styled(message, DIM),
    ])
}

/// An OOM kill.
pub(super) fn kill_line(node: &ObservedNode, time: Timestamp, oom: &OomRecord) -> Line<'static> {
    let pod = oom.pod.as_ref().map_or_else(|| "no pod".to_owned(), report::pod);
    let container = oom.container.as_deref().map(|name| format!(" {name}")).unwrap_or_default();
    let age = if oom.earlier { Span::styled("before", DIM) } else { ago(node, time) };
    let space = if oom.earlier { " " } else { "" };
    Line::from(vec![
        age,
        Span::raw(space),
        Span::styled("OOM ", BAD),
        Span::raw(format!("{pod}{container}: ")),
        Span::styled(verdict(oom), Style::new()),
    ])
}

/// The process that was killed, and whose limit was reached.
pub(super) fn verdict(oom: &OomRecord) -> String {
    let several = if oom.kills == 1 { String::new() } else { format!("{} processes, ", oom.kills) };
    let process = oom.process.as_ref().map(|process| format!(" {}({})", process.name, process.pid)).unwrap_or_default();
    let held = oom.memory.map(|memory| format!(" held {}", text::bytes(memory.total()))).unwrap_or_default();
    let limit = oom.limit_bytes.map(|limit| format!(" of {}", text::bytes(limit))).unwrap_or_default();
    let scope = match oom.scope {
        crate::observe::record::Scope::Node => "the node was out of memory".to_owned(),
        crate::observe::record::Scope::Unknown => "limit unknown".to_owned(),
        scope => format!("limit{limit} of the {}", scope.as_str().replace('-', " ")),
    };
    format!("{several}{}{process}{held}; {scope} ({})", oom.victim.as_str(), oom.confidence.as_str())
}
