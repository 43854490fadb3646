//! Events of a test, and what the eviction manager has logged.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Once;

use tracing::field::Field;
use tracing::field::Visit;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::layer::SubscriberExt as _;

thread_local! {
    /// Events of the test that this thread runs.
    static EVENTS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Keeps events, which the recorder logs, and what the eviction manager logs. For the whole process: a subscriber of one
/// thread may lose what another thread logs first.
struct KeptEvents;

impl<S: tracing::Subscriber> Layer<S> for KeptEvents {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let target = event.metadata().target();
        if target == "keblet::recorder" || target.starts_with("keblet::eviction") {
            let mut line = Line::default();
            event.record(&mut line);
            EVENTS.with_borrow_mut(|events| events.push(line.0));
        }
    }
}

/// Keeps the events of this test from now on.
pub fn keep_events() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let subscriber = tracing_subscriber::registry().with(KeptEvents);
        tracing::subscriber::set_global_default(subscriber).expect("there is no other");
    });
    EVENTS.with_borrow_mut(Vec::clear);
}

/// How many events have this reason.
pub fn events(reason: &str) -> usize {
    let reason = format!("reason={reason:?}");
    EVENTS.with_borrow(|events| events.iter().filter(|event| event.contains(&reason)).count())
}

/// The eviction manager has logged this.
pub fn is_logged(text: &str) -> bool {
    logged(text) > 0
}

/// How often the eviction manager has logged this.
pub fn logged(text: &str) -> usize {
    EVENTS.with_borrow(|events| events.iter().filter(|event| event.contains(text)).count())
}

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}
