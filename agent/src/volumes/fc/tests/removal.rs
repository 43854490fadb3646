//! Disks that do not answer while they are removed.

use std::collections::BTreeMap;
use std::pin::pin;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::*;
use crate::host_program::Call;
use crate::host_program::Ended;
use crate::host_program::ProgramError;
use crate::host_program::Programs;
use crate::objects::Objects;
use crate::volumes::Volumes;

/// Programs of which blockdev(8) does not end before `end` is closed.
#[derive(Debug)]
struct Hanging {
    programs: Arc<dyn Programs>,
    reached: Notify,
    end: Semaphore,
}

impl Programs for Hanging {
    fn run<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Ended, ProgramError>> {
        Box::pin(async move {
            if call.program() == "blockdev" {
                self.reached.notify_one();
                let _ = self.end.acquire().await;
            }
            self.programs.run(call).await
        })
    }
}

#[test]
fn a_disk_that_is_being_removed_delays_no_other_one() {
    in_private_mounts(|| {
        let fixture = fc_node();
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        fixture.disk("sdb", "240:16", &by_path(WWN, 1));
        fixture.test.link("dev/disk/by-id/scsi-3600a", "../../sda");
        let programs: Arc<dyn Programs> = fixture.programs.clone();
        let hanging = Arc::new(Hanging { programs, reached: Notify::new(), end: Semaphore::new(0) });
        let mut volumes = Volumes::new(fixture.root.path());
        volumes.node.disks.tools.programs = hanging.clone();
        volumes.node.disks.tools.host = fixture.test.host();
        let volumes = volumes.with_objects(Objects::standalone(), BTreeMap::new());
        fixture.set_up_by(&volumes, &pod("u-1", json!({}))).expect("mounted");
        fixture.tear_down(&volumes, "u-1");

        let (other, same) = (json!({"lun": 1}), json!({"targetWWNs": null, "lun": null, "wwids": ["3600a"]}));
        let (other, same) = (pod("u-2", other), pod("u-3", same));
        let place = fixture.place("50060e801049cfd1-lun-0");
        fixture.runtime.block_on(async {
            let attachments = async {
                hanging.reached.notified().await;
                volumes.set_up(&other, None).await.expect("it does not wait for another disk");
                let mut same = pin!(volumes.set_up(&same, None));
                timeout(Duration::from_secs(60), &mut same).await.expect_err("its disk is being removed");
                assert_eq!(fixture.deleted("sda"), "");
                hanging.end.close();
                same.await.expect("the disk is found after that");
            };
            let (released, ()) = tokio::join!(volumes.release_unused(&place), attachments);
            released.expect("released");
        });
        assert_eq!((fixture.deleted("sda"), fixture.deleted("sdb")), ("1".to_owned(), String::new()));
        assert!(!place.exists() && fixture.target("u-3").join("mounted").exists());
        for uid in ["u-2", "u-3"] {
            fixture.tear_down(&volumes, uid);
        }
        assert_eq!(fixture.release(&volumes), 2);
    });
}
