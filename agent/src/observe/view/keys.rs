//! What keys do: changes of the settings. Pure.

use ratatui::crossterm::event::KeyCode;
use ratatui::crossterm::event::KeyEvent;
use ratatui::crossterm::event::KeyModifiers;

use super::Settings;
use crate::observe::state::ObservedNode;

/// Pods that are skipped by a page.
const PAGE: isize = 10;
/// Longest filter, in characters.
const FILTER: usize = 100;

/// What follows a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The view goes on.
    Continue,
    /// The user has quit.
    Quit,
}

impl Settings {
    /// Applies a key. `node` is what is shown.
    pub fn key(&mut self, key: KeyEvent, node: &ObservedNode) -> After {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return After::Quit;
        }
        if self.typing {
            self.type_filter(key.code);
            return After::Continue;
        }
        match key.code {
            KeyCode::Char('q') => return After::Quit,
            KeyCode::Esc => self.back(),
            KeyCode::Char('?') => self.help = !self.help,
            KeyCode::Char(' ') => self.frozen = !self.frozen,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('/') => (self.typing, self.opened) = (true, None),
            KeyCode::Enter => self.opened = self.pods(node).get(self.index(node)).map(|pod| pod.pod.pod.uid.clone()),
            KeyCode::Up | KeyCode::Char('k') => self.select(node, -1),
            KeyCode::Down | KeyCode::Char('j') => self.select(node, 1),
            KeyCode::PageUp => self.select(node, -PAGE),
            KeyCode::PageDown => self.select(node, PAGE),
            KeyCode::Home => self.select(node, isize::MIN),
            KeyCode::End => self.select(node, isize::MAX),
            _ => {}
        }
        After::Continue
    }

    fn back(&mut self) {
        if self.help {
            self.help = false;
        } else if self.opened.take().is_none() {
            self.filter.clear();
        }
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) if self.filter.chars().count() < FILTER => self.filter.push(c),
            _ => {}
        }
    }

    fn index(&self, node: &ObservedNode) -> usize {
        self.position(&self.pods(node))
    }

    /// Selects the pod so many places below; an opened pod is replaced by it.
    fn select(&mut self, node: &ObservedNode, by: isize) {
        let pods = self.pods(node);
        let last = pods.len().saturating_sub(1);
        let position = self.position(&pods).saturating_add_signed(by).min(last);
        self.selected = pods.get(position).map(|pod| pod.pod.pod.uid.clone());
        if self.opened.is_some() {
            self.opened.clone_from(&self.selected);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::record::samples;
    use crate::observe::view::Sort;

    fn press(settings: &mut Settings, keys: &[KeyCode]) -> After {
        let node = samples::node();
        keys.iter().fold(After::Continue, |_, key| settings.key(KeyEvent::from(*key), &node))
    }

    fn shown(settings: &Settings) -> Vec<String> {
        settings.pods(&samples::node()).iter().map(|pod| pod.pod.pod.name.clone()).collect()
    }

    fn selected(settings: &Settings) -> String {
        let (node, pods) = (samples::node(), shown(settings));
        pods[settings.position(&settings.pods(&node))].clone()
    }

    #[test]
    fn sorting() {
        let mut settings = Settings::default();
        assert_eq!(shown(&settings)[..2], ["cart-7d9f", "report-28"]);
        press(&mut settings, &[KeyCode::Char('s')]);
        assert_eq!(settings.sort, Sort::Name);
        let by_name = ["report-28", "coredns-5d78", "kube-proxy-x2v9", "cart-7d9f", "web-6c4b"];
        assert_eq!(shown(&settings), by_name, "by namespace first");
        press(&mut settings, &[KeyCode::Char('r')]);
        assert_eq!(shown(&settings)[0], "web-6c4b");
        for (sort, first) in [
            (Sort::Restarts, "cart-7d9f"),
            (Sort::LastExit, "report-28"),
            (Sort::OomKills, "cart-7d9f"),
            (Sort::Memory, "report-28"),
            (Sort::Cpu, "report-28"),
        ] {
            assert_eq!(shown(&Settings { sort, ..Settings::default() })[0], first, "{sort:?}");
        }
        let all = (0..Sort::ALL.len()).fold(Sort::default(), |sort, _| sort.next());
        assert_eq!(all, Sort::default());
    }

    #[test]
    fn filtering() {
        let mut settings = Settings::default();
        press(&mut settings, &[KeyCode::Char('/'), KeyCode::Char('q'), KeyCode::Backspace]);
        press(&mut settings, &"KUBE dns".chars().map(KeyCode::Char).collect::<Vec<_>>());
        assert_eq!(shown(&settings), ["coredns-5d78"], "all words, any case");
        press(&mut settings, &[KeyCode::Enter]);
        assert!(!settings.typing && !settings.filter.is_empty());
        press(&mut settings, &[KeyCode::Esc]);
        assert_eq!(settings, Settings::default());
    }

    #[test]
    fn selecting_and_opening() {
        let mut settings = Settings::default();
        assert_eq!(selected(&settings), "cart-7d9f");
        press(&mut settings, &[KeyCode::Down]);
        assert_eq!(selected(&settings), "report-28");
        press(&mut settings, &[KeyCode::Enter, KeyCode::Home]);
        let opened = settings.opened.clone().unwrap();
        assert_eq!(samples::node().pods[&opened].pod.pod.name, "cart-7d9f");
        press(&mut settings, &[KeyCode::Esc, KeyCode::End, KeyCode::Down, KeyCode::PageUp, KeyCode::PageUp]);
        assert_eq!((settings.opened.as_ref(), selected(&settings).as_str()), (None, "cart-7d9f"));
        // What is shown in another order keeps the selection.
        press(&mut settings, &[KeyCode::Char('s'), KeyCode::Char('r')]);
        assert_eq!(selected(&settings), "cart-7d9f");
    }

    #[test]
    fn an_empty_node_has_nothing_to_select() {
        let (mut settings, node) = (Settings::default(), ObservedNode::default());
        for code in [KeyCode::Down, KeyCode::Enter, KeyCode::End] {
            assert_eq!(settings.key(KeyEvent::from(code), &node), After::Continue);
        }
        assert_eq!(settings, Settings::default());
    }

    #[test]
    fn quitting_and_freezing() {
        let mut settings = Settings::default();
        press(&mut settings, &[KeyCode::Char(' '), KeyCode::Char('?')]);
        assert!(settings.frozen && settings.help);
        assert_eq!(press(&mut settings, &[KeyCode::Char('q')]), After::Quit);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        let typing = &mut Settings { typing: true, ..Settings::default() };
        assert_eq!(typing.key(control_c, &ObservedNode::default()), After::Quit);
    }
}
