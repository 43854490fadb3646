//! One pod alone: its containers, pressure, OOM kills and exits.

use ratatui::buffer::Buffer;
use ratatui::layout::Constraint;
use ratatui::layout::Layout;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::text::Span;

use super::events::exit_line;
use super::events::kill_line;
use super::events::list;
use super::frame::DIM;
use super::frame::GOOD;
use super::frame::WARNING;
use super::frame::pressure_style;
use super::pods::exit_style;
use super::pods::exit_text;
use crate::observe::record::ContainerView;
use crate::observe::record::Resource;
use crate::observe::record::RunState;
use crate::observe::report;
use crate::observe::state::ObservedNode;
use crate::observe::state::ObservedPod;
use crate::observe::state::SAMPLES;
use crate::observe::text;

pub(super) fn draw(node: &ObservedNode, pod: &ObservedPod, area: Rect, buffer: &mut Buffer) {
    let identity = identity(pod);
    let containers: Vec<Line<'_>> =
        pod.pod.containers.iter().flat_map(|container| container_lines(node, container)).collect();
    let pressure = pressure(node, pod);
    let length = |lines: &[Line<'_>]| Constraint::Length(u16::try_from(lines.len() + 1).unwrap_or(u16::MAX));
    let rows = [length(&identity), length(&containers), length(&pressure), Constraint::Fill(1)];
    let [first, second, third, last] = Layout::vertical(rows).areas(area);
    list(" Pod ", identity, first, buffer);
    list(" Containers ", containers, second, buffer);
    list(" Pressure ", pressure, third, buffer);
    list(" OOM kills and exits ", happened(node, pod), last, buffer);
}

fn identity(pod: &ObservedPod) -> Vec<Line<'static>> {
    let record = &pod.pod;
    let network = match (record.host_network, record.ips.is_empty()) {
        (true, _) => "the node's network".to_owned(),
        (false, true) => "no address".to_owned(),
        (false, false) => record.ips.join(", "),
    };
    let sandbox = if record.sandbox_ready { "sandbox ready" } else { "sandbox not ready" };
    vec![Line::from(vec![
        Span::raw(format!("{}  ", record.pod)),
        Span::styled(format!("{}  {sandbox}  {network}", record.pod.uid), DIM),
    ])]
}

fn container_lines(node: &ObservedNode, container: &ContainerView) -> Vec<Line<'static>> {
    let style = if container.state == RunState::Running { GOOD } else { WARNING };
    let since = container.started_at.map(|at| format!(" since {}", text::age(node.now.since(at)))).unwrap_or_default();
    let mut line = vec![
        Span::raw(format!("{:<20} ", container.name)),
        Span::styled(format!("{}{since}", container.state.as_str()), style),
        Span::raw(format!("  {} restarts", container.restarts)),
    ];
    if let Some(exit) = &container.last_exit {
        let ago = exit.finished_at.map(|at| format!(" {} ago", text::age(node.now.since(at)))).unwrap_or_default();
        line.push(Span::styled(format!("  last exit: {}{ago}", exit_text(exit)), exit_style(exit)));
    }
    line.push(Span::styled(format!("  {}", container.image), DIM));
    let message = container.last_exit.as_ref().map(|exit| exit.message.as_str()).filter(|text| !text.is_empty());
    let message = message.map(|text| Line::styled(format!("  {text}"), DIM));
    std::iter::once(Line::from(line)).chain(message).collect()
}

fn pressure(node: &ObservedNode, pod: &ObservedPod) -> Vec<Line<'static>> {
    let Some(record) = &pod.pressure else { return vec![Line::styled("not measured", DIM)] };
    let mut lines = Vec::new();
    for resource in Resource::ALL {
        let Some(waiting) = record.waiting(resource) else { continue };
        let percents = format!(
            "{:<7} some {:>5.1} {:>5.1} {:>5.1} %   full {:>5.1} %   ",
            resource.as_str(),
            waiting.some.avg10,
            waiting.some.avg60,
            waiting.some.avg300,
            waiting.full.avg10
        );
        let history = text::sparkline(&pod.history.last(resource, SAMPLES), SAMPLES);
        let style = pressure_style(waiting.some.avg10);
        lines.push(Line::from(vec![Span::raw(percents), Span::styled(history, style)]));
    }
    let reclaim = record.reclaim.map(|one| format!("   {} reclaims, {:.1} s", one.stalls, one.total_seconds));
    let cpus = record.cpus.map(|cpus| format!("   {cpus:.2} CPUs")).unwrap_or_default();
    lines.push(Line::raw(format!("memory {}{cpus}{}", report::memory(record), reclaim.unwrap_or_default())));
    let stalls = node.current_stalls().into_iter();
    let concerns = |stall: &&crate::observe::record::StallRecord| {
        stall.pod.uid == pod.pod.pod.uid || stall.by.as_ref().is_some_and(|by| by.uid == pod.pod.pod.uid)
    };
    lines.extend(stalls.filter(concerns).map(|stall| Line::styled(report::stall(stall), WARNING)));
    lines
}

fn happened(node: &ObservedNode, pod: &ObservedPod) -> Vec<Line<'static>> {
    let kills = node.oom_kills_of(&pod.pod.pod).map(|(time, oom)| kill_line(node, *time, oom));
    let exits = node.exits.iter().rev().filter(|(_, exit)| exit.pod.uid == pod.pod.pod.uid);
    let exits = exits.map(|(time, exit)| exit_line(node, *time, exit));
    let lines: Vec<Line<'static>> = kills.chain(exits).collect();
    if lines.is_empty() { vec![Line::styled("none", DIM)] } else { lines }
}
