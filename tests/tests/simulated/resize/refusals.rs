//! Resizes that the runtime refuses for ever.

use tracing_subscriber::layer::SubscriberExt as _;

use super::*;
use crate::retries::ByMinute;
use crate::retries::Warnings;
use crate::retries::refuse;

#[tokio::test(start_paused = true)]
async fn a_resize_that_is_refused_for_ever_is_retried_with_growing_pauses_and_reported() {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let site = ResizableNode::new(4000);
    let (agent, _, events) = site.start(vec![cpu("web", 1, "1")]);
    site.until_running("web").await;
    refuse(&site.sim, Method::UpdateContainerResources);
    agent.update(cpu("web", 2, "2")).await;
    let observed = ByMinute::observe(&site.sim, Method::UpdateContainerResources, &warnings, 20).await;
    // 10 s, doubling to a minute, and up to half as much again.
    let calls = [observed.calls(0..1), observed.calls(10..20)];
    assert!((2..=4).contains(&calls[0]) && (5..=11).contains(&calls[1]), "{calls:?}");
    assert!((1..=2).contains(&observed.refusals().len()), "{:#?}", observed.refusals());
    observed.assert_reported(true);
    assert_eq!(reasons(&events), ["ResizeStarted", "ResizeError"], "an error is reported once");
    assert_eq!(site.instances("web"), 1);
}
