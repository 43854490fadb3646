//! The terminal view: a picture of the observed node, as a function of the node, the user's settings and the size.
//!
//! ```text
//!  ObservedNode ─┐
//!  Settings ─────┼─▶ draw ─▶ Buffer ─▶ terminal · SVG · tests
//!  Rect ─────────┘
//!  key ─▶ keys ─▶ Settings
//! ```

mod detail;
mod events;
mod frame;
mod help;
mod keys;
mod pods;
mod settings;
pub mod svg;
pub mod terminal;

use ratatui::buffer::Buffer;
use ratatui::layout::Constraint;
use ratatui::layout::Layout;
use ratatui::layout::Rect;

use super::state::ObservedNode;
pub use keys::After;
pub use settings::Settings;
pub use settings::Sort;

/// The least size that is drawn on.
const LEAST: (u16, u16) = (40, 8);

/// Draws the node.
pub fn draw(node: &ObservedNode, settings: &Settings, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    if area.width < LEAST.0 || area.height < LEAST.1 {
        buffer.set_stringn(area.x, area.y, "the terminal is too small", area.width.into(), frame::WARNING);
        return;
    }
    let header = frame::header_height(node, area.height);
    let rows = [Constraint::Length(header), Constraint::Fill(1), Constraint::Length(1)];
    let [top, middle, bottom] = Layout::vertical(rows).areas(area);
    frame::header(node, settings, top, buffer);
    frame::footer(settings, bottom, buffer);
    if settings.help {
        return help::draw(middle, buffer);
    }
    if let Some(pod) = settings.opened.as_ref().and_then(|uid| node.pods.get(uid)) {
        return detail::draw(node, pod, middle, buffer);
    }
    // Events take a third, if there is room for both.
    let events = if middle.height >= 14 { (middle.height / 3).max(5) } else { 0 };
    let [table, below] = Layout::vertical([Constraint::Fill(1), Constraint::Length(events)]).areas(middle);
    pods::draw(node, settings, table, buffer);
    if events > 0 {
        events::draw(node, below, buffer);
    }
}

#[cfg(test)]
mod tests;
