//! Numbers of any size in the specs of probes. Those of static pods are not validated.

use super::*;

#[tokio::test(start_paused = true)]
async fn numbers_of_any_size_hold_up_neither_their_pod_nor_another() {
    let greatest = json!({
        "initialDelaySeconds": i32::MAX,
        "periodSeconds": i32::MAX,
        "timeoutSeconds": i32::MAX,
        "failureThreshold": i32::MAX,
        "successThreshold": i32::MAX,
    });
    let least = json!({
        "initialDelaySeconds": i32::MIN,
        "periodSeconds": i32::MIN,
        "timeoutSeconds": -1,
        "failureThreshold": -1,
        "successThreshold": 0,
    });
    // The exit code of the command, and whether the container is ready in the end.
    for (kind, numbers, code, is_ready) in [
        ("startupProbe", greatest.clone(), 0, false),
        ("readinessProbe", greatest.clone(), 0, false),
        ("livenessProbe", greatest, 1, true),
        ("startupProbe", least.clone(), 0, true),
        ("readinessProbe", least.clone(), 0, true),
        ("livenessProbe", least, 0, true),
        ("livenessProbe", json!({ "initialDelaySeconds": i32::MAX }), 1, true),
        ("livenessProbe", json!({ "failureThreshold": i32::MAX }), 1, true),
        ("readinessProbe", json!({ "periodSeconds": i32::MAX }), 0, true),
        ("readinessProbe", json!({ "successThreshold": i32::MAX }), 0, false),
    ] {
        let row = format!("{kind} {numbers} {code}");
        let web = with(pod("web").running("main", "term 100ms"), "main", &json!({ kind: exec(&numbers) }));
        let probed = json!({ "readinessProbe": exec(&json!({ "periodSeconds": 1 })) });
        let calm = with(pod("calm").running("main", "run"), "main", &probed);
        let world = World::start(vec![web.clone(), calm], |sim| {
            sim.script_exec("web", "main", ExecResult { code, ..ExecResult::default() });
        });
        world.until("it runs", |l| l.live("web", "main").is_some()).await;
        world.until_ready("calm", true).await;
        // No more events of failures than the spam filter lets pass.
        sleep(seconds(100)).await;
        assert_eq!(world.ready("web"), is_ready, "{row}");
        let since = Instant::now();
        world.agent.remove(web).await;
        world.until("it is stopped", |l| l.live("web", "main").is_none()).await;
        assert!(since.elapsed() < seconds(10), "{row}: {:?}", since.elapsed());
        assert_eq!(world.sim.trace(|l| (attempts(l, "web"), attempts(l, "calm"))), (1, 1), "{row}");
        assert!(world.ready("calm"), "{row}");
    }
}

/// The grace period of a probe may be any positive number, and that of the pod's termination ends it.
#[tokio::test(start_paused = true)]
async fn the_longest_grace_period_of_a_probe_ends_with_the_pod() {
    let numbers = json!({ "periodSeconds": 1, "failureThreshold": 1, "terminationGracePeriodSeconds": i64::MAX });
    for kind in ["livenessProbe", "startupProbe"] {
        let web = with(pod("web").running("main", "term ignore"), "main", &json!({ kind: exec(&numbers) }));
        let world = World::start(vec![web.clone()], |sim| {
            sim.script_exec("web", "main", ExecResult { code: 1, ..ExecResult::default() });
        });
        world.until_stopping().await;
        sleep(seconds(200)).await;
        assert_eq!(world.sim.trace(|l| (attempts(l, "web"), l.live_count())), (1, 1), "{kind}");
        let since = Instant::now();
        world.agent.remove(web).await;
        world.until("it is stopped", |l| l.live_count() == 0).await;
        assert!(since.elapsed() < seconds(15), "{kind}: {:?}", since.elapsed());
        assert_eq!(world.sim.trace(|l| attempts(l, "web")), 1, "{kind}");
    }
}
