//! One HTML page with the pooled values of all runs, without external resources.

use std::fmt::Write as _;

use super::Metric;
use super::Report;
use super::measured;
use super::plot;
use crate::results::Results;
use crate::results::Summary;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
h2{font-size:1.1em;margin:2.2em 0 .4em}table{border-collapse:collapse}\
td,th{padding:.15em .9em .15em 0;text-align:right;font-weight:normal;font-variant-numeric:tabular-nums}\
th{color:#777}td:first-child,th:first-child{text-align:left}\
i{display:inline-block;width:.8em;height:.8em;margin-right:.5em;border-radius:2px}\
b.bar{display:inline-block;height:.7em;border-radius:2px}\
svg{max-width:100%;height:auto}.failed{color:#b00020}p{margin:.3em 0}";

/// The page.
pub(super) fn render(report: &Report) -> anyhow::Result<String> {
    let setup = &report.setup;
    let results = report.pooled();
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>keblet bench {name}</title>\
         <style>{STYLE}</style></head><body>\n<h1>keblet bench {name}</h1>\n<p>commit {}; {}; {} runs</p>\n",
        escaped(&setup.commit),
        escaped(&setup.environment.line()),
        report.runs.len(),
        name = setup.benchmark,
    );
    for metric in measured(&results, &setup.participants) {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(&metric.title(setup.counts)));
        page.push_str(&figures(&setup.participants, &results, metric));
        page.push_str(&plot::distribution(&setup.participants, &results, metric)?.unwrap_or_default());
    }
    for failure in &results.failures {
        let _ = writeln!(page, "<p class=\"failed\">failed: {}</p>", escaped(failure));
    }
    page.push_str("</body></html>\n");
    Ok(page)
}

fn figures(participants: &[String], results: &Results, metric: Metric) -> String {
    let summaries: Vec<(usize, &String, Summary)> = participants
        .iter()
        .enumerate()
        .filter_map(|(index, participant)| Some((index, participant, results.summary(metric, participant)?)))
        .collect();
    let largest = summaries.iter().map(|(_, _, summary)| summary.p50).fold(0.0, f64::max);
    let names: &[&str] = if metric.is_single() { &["", "value", ""] } else { &["", "p50", "p90", "p99", "max", "n"] };
    let mut html = format!("<table>\n<tr>{}</tr>\n", cells("th", names.iter().map(|name| (*name).to_owned())));
    for (index, participant, summary) in summaries {
        let colour = plot::css_colour(index);
        let name = format!("<i style=\"background:{colour}\"></i>{}", escaped(participant));
        let show = |value| metric.show(value);
        let row = if metric.is_single() {
            let width = if largest > 0.0 { summary.p50 / largest * 320.0 } else { 0.0 };
            let bar = format!("<b class=\"bar\" style=\"width:{width:.0}px;background:{colour}\"></b>");
            vec![name, show(summary.p50), bar]
        } else {
            let Summary { count, p50, p90, p99, max } = summary;
            vec![name, show(p50), show(p90), show(p99), show(max), count.to_string()]
        };
        let _ = writeln!(html, "<tr>{}</tr>", cells("td", row.into_iter()));
    }
    html + "</table>\n"
}

fn cells(tag: &str, contents: impl Iterator<Item = String>) -> String {
    contents.map(|content| format!("<{tag}>{content}</{tag}>")).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::tests::results;
    use super::super::tests::setup;
    use super::*;

    #[test]
    fn the_page_is_complete_and_escaped() {
        let mut run = results([0.070, 0.072, 0.300]);
        run.failures.push("keblet: <pod> ran twice".to_owned());
        let page = render(&Report { setup: setup(Path::new("")), runs: vec![run] }).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(page.contains("&lt;pod&gt; ran twice") && !page.contains("<pod>"), "{page}");
        assert_eq!(page.matches("<svg").count(), 1, "one distribution was measured");
        assert_eq!(page.matches("class=\"bar\"").count(), 2);
        assert!(!page.contains("src=") && !page.contains("href="), "loads nothing");
    }
}
