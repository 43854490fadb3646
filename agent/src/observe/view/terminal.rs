//! The terminal itself: raw mode and the alternate screen, which are left again whatever happens, and the user's keys.

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event;
use ratatui::crossterm::event::Event;
use ratatui::crossterm::event::KeyEventKind;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::After;
use super::Settings;
use super::draw;
use crate::observe::collect::Message;
use crate::observe::metrics::SharedNode;
use crate::observe::state::ObservedNode;

/// The least time between two pictures that only new records ask for.
const PAUSE: Duration = Duration::from_millis(200);
/// Ages in the picture grow without records.
const REFRESH: Duration = Duration::from_secs(1);

/// Leaves the alternate screen and raw mode when dropped; on a panic, ratatui's hook has done so before the message.
struct Screen(DefaultTerminal);

impl Screen {
    fn enter() -> io::Result<Self> {
        ratatui::try_init().map(Self)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the node, `live` or recorded, until the user quits, a signal cancels `shutdown`, or the collector ends.
///
/// # Errors
/// The terminal cannot be used.
pub async fn run(
    mut messages: mpsc::Receiver<Message>,
    node: SharedNode,
    mut settings: Settings,
    live: bool,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let mut screen = Screen::enter()?;
    let mut keys = keys()?;
    let mut frozen: Option<ObservedNode> = None;
    let mut due = Instant::now();
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            event = keys.recv() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    let shown = frozen.clone().unwrap_or_else(|| current(&node, live));
                    if settings.key(key, &shown) == After::Quit {
                        return Ok(());
                    }
                    frozen = settings.frozen.then_some(shown);
                    due = Instant::now();
                }
                Some(Ok(_)) => due = Instant::now(),
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            },
            message = messages.recv() => match message {
                Some(message) => {
                    take(message, &node);
                    due = due.min(Instant::now() + PAUSE);
                }
                None => return Ok(()),
            },
            () = tokio::time::sleep_until(due) => {
                let shown = frozen.clone().unwrap_or_else(|| current(&node, live));
                screen.0.draw(|frame| draw(&shown, &settings, frame.area(), frame.buffer_mut()))?;
                due = Instant::now() + REFRESH;
            }
        }
    }
}

/// Takes a message into the shared node.
pub fn take(message: Message, node: &SharedNode) {
    match message {
        Message::Line(line) => node.lock().unwrap_or_else(std::sync::PoisonError::into_inner).apply(&line),
        // Fails if the scrape was given up.
        Message::Measured(done) => drop(done.send(())),
    }
}

/// A copy; of a live node with the present time.
fn current(node: &SharedNode, live: bool) -> ObservedNode {
    let mut node = node.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    if live {
        node.now = node.now.max(std::time::SystemTime::now().into());
    }
    node
}

/// The user's keys, read by a thread of its own: reading blocks. It ends with the process.
fn keys() -> io::Result<mpsc::Receiver<io::Result<Event>>> {
    let (sender, receiver) = mpsc::channel(16);
    let read = move || {
        loop {
            let event = event::read();
            let failed = event.is_err();
            if sender.blocking_send(event).is_err() || failed {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(receiver)
}
