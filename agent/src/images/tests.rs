//! What is remembered, and for how long.

use std::time::Duration;

use super::remembered::Memory;
use super::*;

fn facts(image_ref: &str) -> ImageFacts {
    ImageFacts { image_ref: image_ref.into(), uid: None, username: String::new(), size: 1 }
}

#[tokio::test(start_paused = true)]
async fn memory_is_per_pod_and_grows_stale() {
    let mut memory = Memory::default();
    let now = Instant::now();
    memory.remember("u1", "app:1", facts("x"), now);
    memory.remember("u2", "app:1", facts("x"), now);
    memory.remember("u2", "side:1", facts("y"), now);
    assert_eq!(memory.recall("u1", "app:1", now), Some(Remembered { facts: facts("x"), stale: false }));
    assert_eq!(memory.recall("u1", "app:2", now), None);
    let later = now + Duration::from_secs(61);
    assert!(memory.recall("u1", "app:1", later).expect("kept").stale);
    memory.forget_image("app:1");
    assert_eq!(memory.recall("u1", "app:1", now), None);
    assert_eq!(memory.recall("u2", "app:1", now), None);
    assert!(memory.recall("u2", "side:1", now).is_some());
    memory.forget_pod("u2");
    assert_eq!(memory.recall("u2", "side:1", now), None);
}
