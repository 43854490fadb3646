//! A picture of the view as SVG, for documents. Pure.

use std::fmt::Write as _;

use ratatui::buffer::Buffer;
use ratatui::buffer::Cell;
use ratatui::style::Color;
use ratatui::style::Modifier;

/// Size of a cell, and of the type in it, in pixels.
const CELL: (f32, f32) = (8.4, 18.0);
const FONT: f32 = 14.0;
const BACKGROUND: &str = "#16181d";
const FOREGROUND: &str = "#d8dee9";

/// The picture of a buffer.
pub fn picture(buffer: &Buffer) -> String {
    let area = buffer.area;
    let (width, height) = (f32::from(area.width) * CELL.0 + 16.0, f32::from(area.height) * CELL.1 + 16.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-size=\"{FONT}\" \
         font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"{BACKGROUND}\"/>\n"
    );
    for y in area.top()..area.bottom() {
        let mut x = area.left();
        while x < area.right() {
            x = run(buffer, x, y, &mut svg);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// Writes the cells from `x` that look alike; returns the place after them.
fn run(buffer: &Buffer, x: u16, y: u16, svg: &mut String) -> u16 {
    let style = cell_style(&buffer[(x, y)]);
    let end = (x..buffer.area.right()).find(|next| cell_style(&buffer[(*next, y)]) != style);
    let end = end.unwrap_or(buffer.area.right());
    let text: String = (x..end).map(|x| buffer[(x, y)].symbol()).collect();
    let (left, top) = (f32::from(x) * CELL.0 + 8.0, f32::from(y) * CELL.1 + 8.0);
    let length = f32::from(end - x) * CELL.0;
    if style.background != BACKGROUND {
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{}\" fill=\"{}\"/>",
            CELL.1, style.background
        );
    }
    if !text.trim().is_empty() {
        let weight = if style.bold { " font-weight=\"bold\"" } else { "" };
        let _ = writeln!(
            svg,
            "<text x=\"{left:.1}\" y=\"{:.1}\" textLength=\"{length:.1}\" xml:space=\"preserve\" fill=\"{}\"{weight}>{}</text>",
            top + FONT,
            style.foreground,
            escaped(&text)
        );
    }
    end
}

#[derive(PartialEq)]
struct CellStyle {
    foreground: &'static str,
    background: &'static str,
    bold: bool,
}

fn cell_style(cell: &Cell) -> CellStyle {
    let (foreground, background) = (colour(cell.fg, FOREGROUND), colour(cell.bg, BACKGROUND));
    let bold = cell.modifier.contains(Modifier::BOLD);
    match cell.modifier.contains(Modifier::REVERSED) {
        true => CellStyle { foreground: background, background: foreground, bold },
        false => CellStyle { foreground, background, bold },
    }
}

/// The colours that the view uses.
fn colour(colour: Color, otherwise: &'static str) -> &'static str {
    match colour {
        Color::Red => "#f07178",
        Color::Yellow => "#e6c07b",
        Color::Green => "#98c379",
        Color::Cyan => "#61c8d8",
        Color::DarkGray => "#7f8794",
        _ => otherwise,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    use super::*;
    use crate::observe::replay;
    use crate::observe::view::Settings;
    use crate::observe::view::draw;

    #[test]
    fn runs_of_one_style_are_one_element() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 10, 2));
        buffer.set_string(0, 0, "a<b", Style::new().fg(Color::Red));
        buffer.set_string(0, 1, "sel", Style::new().add_modifier(Modifier::REVERSED));
        let svg = picture(&buffer);
        assert!(svg.contains("fill=\"#f07178\">a&lt;b</text>"), "{svg}");
        assert!(
            svg.contains(&format!("fill=\"{FOREGROUND}\"/>")) && svg.contains(&format!("fill=\"{BACKGROUND}\">sel"))
        );
        assert_eq!(svg.matches("<text").count(), 2);
    }

    /// The document has the commands that write them.
    #[test]
    fn the_pictures_in_the_documentation_show_the_present_view() {
        let recording = include_str!("../../../../docs/observe.jsonl");
        let node = replay::read(recording.as_bytes()).unwrap();
        let opened = node.pods.values().find(|pod| pod.pod.pod.name == "cart-node-1").unwrap().pod.pod.uid.clone();
        for (written, name, height, opened) in [
            (include_str!("../../../../docs/observe.svg"), "observe.svg", 34, None),
            (include_str!("../../../../docs/observe-pod.svg"), "observe-pod.svg", 24, Some(opened)),
        ] {
            let area = Rect::new(0, 0, 130, height);
            let mut buffer = Buffer::empty(area);
            draw(&node, &Settings { opened, ..Settings::default() }, area, &mut buffer);
            assert!(picture(&buffer) == written, "docs/{name} is out of date: see docs/observe.md");
        }
    }
}
