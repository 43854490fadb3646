//! The table of pods.

use ratatui::buffer::Buffer;
use ratatui::layout::Constraint;
use ratatui::layout::Rect;
use ratatui::style::Modifier;
use ratatui::style::Style;
use ratatui::text::Line;
use ratatui::text::Span;
use ratatui::widgets::Cell;
use ratatui::widgets::Row;
use ratatui::widgets::Table;
use ratatui::widgets::Widget;

use super::Settings;
use super::frame::BAD;
use super::frame::DIM;
use super::frame::GOOD;
use super::frame::TITLE;
use super::frame::WARNING;
use super::frame::pressure_style;
use crate::observe::record::ExitInfo;
use crate::observe::record::Resource;
use crate::observe::record::Timestamp;
use crate::observe::report;
use crate::observe::state::ObservedNode;
use crate::observe::state::ObservedPod;
use crate::observe::text;

/// Width of a sparkline.
const SPARK: usize = 12;
/// Least width of the pods' names, in characters. A narrower table leaves out columns.
const NAMES: u16 = 24;
/// The columns behind the names: heading and width in characters. Sparklines add [`HISTORY`] to the last one.
const COLUMNS: [(&str, u16); 7] =
    [("RUN", 5), ("RST", 4), ("LAST EXIT", 21), ("OOM", 4), ("CPU", 5), ("MEMORY", 11), ("PRESSURE cpu mem io", 19)];
const PRESSURE: usize = 6;
/// Percentages take 15 characters, less than their heading.
const HISTORY: u16 = 15 + SPARK as u16 - COLUMNS[PRESSURE].1;
/// The order in which columns are left out, after the sparklines.
const LEFT_OUT: [usize; 7] = [5, 4, 1, 2, PRESSURE, 3, 0];

/// The columns that have room.
struct Columns {
    /// Places in [`COLUMNS`].
    shown: Vec<usize>,
    /// With sparklines.
    history: bool,
}

impl Columns {
    /// Those of a table so wide.
    fn fitting(width: u16) -> Self {
        // A space stands before each.
        let has_room = |shown: &[usize], more: u16| {
            shown.iter().map(|column| COLUMNS[*column].1 + 1).sum::<u16>() + more + NAMES <= width
        };
        let mut shown: Vec<usize> = (0..COLUMNS.len()).collect();
        let history = has_room(&shown, HISTORY);
        for column in LEFT_OUT {
            if has_room(&shown, 0) {
                break;
            }
            shown.retain(|other| *other != column);
        }
        Self { shown, history }
    }

    fn width(&self, column: usize) -> u16 {
        COLUMNS[column].1 + if column == PRESSURE && self.history { HISTORY } else { 0 }
    }
}

pub(super) fn draw(node: &ObservedNode, settings: &Settings, area: Rect, buffer: &mut Buffer) {
    let pods = settings.pods(node);
    let selected = settings.position(&pods);
    let room = usize::from(area.height.saturating_sub(1));
    // The selected row stays visible.
    let first = (selected + 1).saturating_sub(room);
    let shown = pods.iter().enumerate().skip(first).take(room);
    let columns = Columns::fitting(area.width);
    let rows = shown.map(|(index, pod)| {
        let style = if index == selected { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        row(node, pod, &columns).style(style)
    });
    let widths = columns.shown.iter().map(|column| Constraint::Length(columns.width(*column)));
    let widths = std::iter::once(Constraint::Fill(1)).chain(widths);
    let headings = std::iter::once("POD").chain(columns.shown.iter().map(|column| COLUMNS[*column].0));
    Table::new(rows, widths).header(Row::new(headings).style(TITLE)).render(area, buffer);
}

fn row<'a>(node: &ObservedNode, pod: &'a ObservedPod, columns: &Columns) -> Row<'a> {
    let name = &pod.pod.pod;
    let (running, all) = pod.running();
    let run_style = if running == all && pod.pod.sandbox_ready { GOOD } else { WARNING };
    let restarts = pod.restarts();
    let pressure = pod.pressure.as_ref();
    let cpus = pressure.and_then(|record| record.cpus);
    let oom = if pod.oom_kills > 0 { pod.oom_kills.to_string() } else { String::new() };
    let name = Line::from(vec![Span::styled(format!("{}/", name.namespace), DIM), Span::raw(name.name.as_str())]);
    // In the order of the columns.
    let cells: [Cell<'a>; COLUMNS.len()] = [
        Cell::from(format!("{running}/{all}")).style(run_style),
        Cell::from(if restarts > 0 { restarts.to_string() } else { String::new() }).style(WARNING),
        // A default cell would span no column.
        pod.last_exit().map_or_else(|| Cell::from(""), |exit| last_exit(exit, node.now)),
        Cell::from(oom).style(BAD),
        Cell::from(cpus.map(|cpus| format!("{cpus:.2}")).unwrap_or_default()),
        Cell::from(pressure.map(report::memory).unwrap_or_default()),
        pressure_cell(pod, columns.history),
    ];
    let cells = cells.into_iter().enumerate().filter(|(column, _)| columns.shown.contains(column));
    Row::new(std::iter::once(Cell::from(name)).chain(cells.map(|(_, cell)| cell)))
}

/// How a container has exited, shortly.
pub(super) fn exit_text(exit: &ExitInfo) -> String {
    let code = exit.exit_code.map(|code| format!(" {code}")).unwrap_or_default();
    let reason = match (exit.reason.as_str(), exit.oom_killed) {
        ("", true) => "OOMKilled",
        ("", false) => "exited",
        (reason, _) => reason,
    };
    format!("{reason}{code}")
}

/// The style of an exit.
pub(super) fn exit_style(exit: &ExitInfo) -> Style {
    match (exit.oom_killed, exit.exit_code) {
        (true, _) => BAD,
        (false, Some(0)) => DIM,
        (false, _) => WARNING,
    }
}

fn last_exit(exit: &ExitInfo, now: Timestamp) -> Cell<'static> {
    let ago = exit.finished_at.map(|at| format!(" {}", text::age(now.since(at)))).unwrap_or_default();
    Cell::from(format!("{}{ago}", exit_text(exit))).style(exit_style(exit))
}

fn pressure_cell(pod: &ObservedPod, history: bool) -> Cell<'static> {
    let mut spans = Vec::new();
    for resource in Resource::ALL {
        match pod.percent(resource) {
            Some(percent) => spans.push(Span::styled(format!("{percent:>4.0} "), pressure_style(percent))),
            None => spans.push(Span::styled("   - ", DIM)),
        }
    }
    if history {
        let memory = pod.percent(Resource::Memory).unwrap_or(0.0);
        let history = text::sparkline(&pod.history.last(Resource::Memory, SPARK), SPARK);
        spans.push(Span::styled(history, pressure_style(memory)));
    }
    Cell::from(Line::from(spans))
}
