"use strict";

// Material takes each word of a query as the beginning of a word, above all in titles: the "I" of a question finds "Idea", and the "c" of
// "ctrl-c" finds "Contributing". Messages to its worker are sent without the words that no page is about.
const QUERY = 2; // the type of these messages in mkdocs-material 9
const UNSAID = new Set(
  (
    "a about after again an and any are as at be can could do does for from get give has have how i if in into is it its make many me " +
    "much my need of on or should so some that the their them then there these this to use want was were what when where which who why " +
    "will with would you your"
  ).split(" "),
);

const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message?.type === QUERY) {
    const words = message.data.split(/[\s?!-]+/).filter((word) => word.length > 1 && !UNSAID.has(word.toLowerCase()));
    if (words.length) message = { ...message, data: words.join(" ") };
  }
  return post.call(this, message, ...rest);
};
