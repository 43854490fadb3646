//! What the keys and columns mean.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Widget;

use super::frame::TITLE;

const LINES: [(&str, &str); 20] = [
    ("Keys", ""),
    ("q, Ctrl-C", "quit"),
    ("↑ ↓ j k", "select a pod; also PageUp, PageDown, Home, End"),
    ("Enter", "open the selected pod; Esc closes it"),
    ("s", "sort by pressure, name, restarts, last exit, OOM kills, memory, CPU"),
    ("r", "reverse the order"),
    ("/", "show only pods whose namespace, name and UID contain all words; Enter keeps, Esc drops the filter"),
    ("space", "freeze the view; observing goes on"),
    ("", ""),
    ("Columns", ""),
    ("RUN", "running containers of all containers"),
    ("RST", "restarts of all containers"),
    ("LAST EXIT", "reason and exit code of the latest exit, and how long ago"),
    ("OOM", "processes killed by the OOM killer, those before observing began included"),
    ("CPU", "CPU time, in CPUs"),
    ("MEMORY", "charged memory, and the limit of the pod"),
    ("PRESSURE", "percent of the last ten seconds in which some task waited for CPU, memory, IO; of memory over time"),
    ("Stalls", "pods that wait, and the likely cause: their own limit, or the pod that takes most of the resource"),
    ("", ""),
    ("! ...", "a source of evidence is missing, and what that costs"),
];

pub(super) fn draw(area: Rect, buffer: &mut Buffer) {
    for ((key, meaning), row) in LINES.iter().zip(area.rows()) {
        let line = match meaning.is_empty() {
            true => Line::styled(*key, TITLE),
            false => Line::raw(format!("  {key:<12} {meaning}")),
        };
        line.render(row, buffer);
    }
}
