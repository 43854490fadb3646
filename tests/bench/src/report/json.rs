//! Everything that was measured, for other programs.

use serde_json::json;

use super::Report;
use super::targets;

/// One JSON document.
pub(super) fn render(report: &Report) -> anyhow::Result<String> {
    let mut measured = Vec::new();
    for metric in report.metrics() {
        for column in &report.columns {
            let Some(series) = report.results.get(metric, column) else { continue };
            measured.push(json!({
                "metric": metric,
                "title": report.title(metric),
                "column": column,
                "summary": series.summary(),
                "series": series,
            }));
        }
    }
    let verdicts = targets::judge(&report.results).into_iter().map(|verdict| {
        json!({
            "promise": verdict.promise,
            "measured": verdict.measured,
            "limit": verdict.limit,
            "kept": verdict.is_kept(),
        })
    });
    let document = json!({
        "environment": report.environment,
        "pods": report.pods,
        "rounds": report.rounds,
        "measured": measured,
        "targets": verdicts.collect::<Vec<_>>(),
        "failures": report.results.failures,
    });
    Ok(serde_json::to_string_pretty(&document)?)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::tests::report;
    use super::*;

    #[test]
    fn raw_values_are_kept() {
        let document: Value = serde_json::from_str(&render(&report()).unwrap()).unwrap();
        let first = &document["measured"][0];
        assert_eq!((&first["metric"], &first["column"]), (&json!("restart"), &json!("event floor")));
        assert_eq!(first["series"]["values"], json!([0.110, 0.111, 0.140]));
        assert_eq!(first["summary"]["max"], 0.140);
        assert_eq!(document["environment"]["runtime"], "containerd 1.7.24");
        assert_eq!(document["targets"][1]["kept"], false);
        assert_eq!(document["failures"].as_array().unwrap().len(), 1);
    }
}
